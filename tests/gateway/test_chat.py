"""``/v1/chat/completions`` through the official SDK."""

USER = [{"role": "user", "content": "How many apples?"}]


def contents(completion) -> list[str]:
    return [choice.message.content for choice in completion.choices]


def test_the_prompt_is_the_models_chat_template(sdk, model, tokenizer):
    chat = sdk.chat.completions.create(model=model, messages=USER, seed=1, max_tokens=10)
    ids = tokenizer.encode_chat(USER)
    completion = sdk.completions.create(model=model, prompt=ids, seed=1, max_tokens=10)
    assert contents(chat) == [completion.choices[0].text]
    assert chat.usage.prompt_tokens == len(ids)


def test_the_shape_is_openais(sdk, model):
    chat = sdk.chat.completions.create(model=model, messages=USER, n=2, max_completion_tokens=5)
    assert chat.object == "chat.completion"
    assert chat.id.startswith("chatcmpl-")
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert {choice.message.role for choice in chat.choices} == {"assistant"}
    assert {choice.finish_reason for choice in chat.choices} == {"length"}
    assert chat.usage.completion_tokens == 10


def test_content_may_come_in_parts(sdk, model):
    parts = [{"type": "text", "text": "How many"}, {"type": "text", "text": " apples?"}]
    common = {"model": model, "seed": 1, "max_tokens": 10}
    in_parts = sdk.chat.completions.create(messages=[{"role": "user", "content": parts}], **common)
    assert contents(in_parts) == contents(sdk.chat.completions.create(messages=USER, **common))


def test_a_developer_is_a_system_to_the_template(sdk, model):
    def ask(role):
        messages = [{"role": role, "content": "Be brief."}, *USER]
        return contents(sdk.chat.completions.create(model=model, messages=messages, seed=1, max_tokens=10))

    assert ask("developer") == ask("system")


def test_the_answer_may_fill_the_context_by_default(sdk, model):
    usage = sdk.chat.completions.create(model=model, messages=USER).usage
    assert usage.total_tokens == 2048


def test_max_completion_tokens_counts_before_max_tokens(sdk, model):
    chat = sdk.chat.completions.create(model=model, messages=USER, max_tokens=9, max_completion_tokens=3)
    assert chat.usage.completion_tokens == 3


def test_logprobs_have_tokens_and_bytes(sdk, model):
    choice = sdk.chat.completions.create(
        model=model, messages=USER, seed=3, max_tokens=12, logprobs=True, top_logprobs=4
    ).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 12
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob < 0
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)


def test_neutral_values_of_parameters_not_supported_yet_pass(sdk, model):
    chat = sdk.chat.completions.create(
        model=model,
        messages=USER,
        max_tokens=2,
        response_format={"type": "text"},
        tools=[],
        presence_penalty=0,
        store=False,
        metadata={"a": "b"},
        user="me",
    )
    assert chat.usage.completion_tokens == 2


async def test_the_async_sdk_streams(deployment, model):
    async with deployment.async_sdk() as client:
        whole = await client.chat.completions.create(model=model, messages=USER, seed=9, max_tokens=25, n=2)
        stream = await client.chat.completions.create(
            model=model, messages=USER, seed=9, max_tokens=25, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, reasons, roles, usage = ["", ""], [None, None], [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                roles += [choice.index] if choice.delta.role else []
    assert texts == contents(whole)
    assert reasons == ["length", "length"]
    assert sorted(roles) == [0, 1]
    assert usage.total_tokens == whole.usage.total_tokens
