"""``/v1/completions`` through the official SDK."""

import pytest

from tests.gateway.tokens import token_bytes


def texts(completion) -> list[str]:
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.text for choice in completion.choices]


def test_every_form_of_a_prompt_means_the_same(sdk, model, tokenizer):
    ids = tokenizer.encode("Tom has 3 apples")
    common = {"model": model, "seed": 1, "max_tokens": 12}
    alone = texts(sdk.completions.create(prompt="Tom has 3 apples", **common))
    assert texts(sdk.completions.create(prompt=["Tom has 3 apples"], **common)) == alone
    assert texts(sdk.completions.create(prompt=ids, **common)) == alone
    assert texts(sdk.completions.create(prompt=[ids, ids[:3]], **common))[:1] == alone


def test_choices_come_prompt_by_prompt_in_sample_order(sdk, model):
    common = {"model": model, "seed": 7, "max_tokens": 10, "n": 3}
    both = texts(sdk.completions.create(prompt=["one", "two"], **common))
    assert both == texts(sdk.completions.create(prompt="one", **common)) + texts(
        sdk.completions.create(prompt="two", **common)
    )
    assert len(set(both)) == 6


def test_samples_differ_and_a_seed_repeats_them(sdk, model):
    def sample(seed):
        return texts(sdk.completions.create(model=model, prompt="x", n=8, seed=seed, max_tokens=10))

    first = sample(3)
    assert len(set(first)) == 8
    assert sample(3) == first
    assert set(sample(4)).isdisjoint(first)


def test_a_prompt_given_twice_gets_noise_of_its_own_each_time(sdk, model):
    common = {"model": model, "seed": 5, "max_tokens": 10}
    first, second = texts(sdk.completions.create(prompt=["same", "same"], **common))
    assert first != second
    assert texts(sdk.completions.create(prompt=["same", "same"], **common)) == [first, second]
    assert texts(sdk.completions.create(prompt="same", **common)) == [first]


def test_a_negative_seed_is_a_seed(sdk, model):
    common = {"model": model, "prompt": "x", "seed": -1, "max_tokens": 10}
    assert texts(sdk.completions.create(**common)) == texts(sdk.completions.create(**common))


def test_without_a_seed_every_request_differs(sdk, model):
    def sample():
        return texts(sdk.completions.create(model=model, prompt="x", temperature=1, max_tokens=10))

    assert sample() != sample()


def test_sixteen_tokens_by_default_and_the_reason_is_length(sdk, model):
    completion = sdk.completions.create(model=model, prompt="x")
    assert completion.usage.completion_tokens == 16
    assert completion.choices[0].finish_reason == "length"
    assert completion.object == "text_completion"
    assert completion.id.startswith("cmpl-")
    assert completion.model == model


def test_the_newer_name_of_max_tokens_counts_here_too(sdk, model):
    completion = sdk.completions.create(model=model, prompt="x", extra_body={"max_completion_tokens": 40})
    assert completion.usage.completion_tokens == 40


def test_an_answer_ends_where_the_context_ends(sdk, model):
    completion = sdk.completions.create(model=model, prompt=[20] * 2040, max_tokens=5000)
    assert completion.usage.completion_tokens == 8
    assert completion.choices[0].finish_reason == "length"


def test_usage_counts_each_prompt_once(sdk, model):
    usage = sdk.completions.create(model=model, prompt=[[20, 21, 22], [23]], n=4, max_tokens=5).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 40, 44)


def test_usage_tells_what_was_cached(sdk, model):
    prompt = list(range(100, 200))
    sdk.completions.create(model=model, prompt=prompt, max_tokens=1)
    usage = sdk.completions.create(model=model, prompt=prompt, n=2, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == 96


def test_legacy_logprobs_line_up_with_the_text(sdk, model):
    choice = sdk.completions.create(model=model, prompt="x", seed=2, max_tokens=20, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 20
    for token, value, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True
    ):
        assert value < 0
        assert top[token] == value
        assert 3 <= len(top) <= 4
        assert choice.text[offset:].startswith(token) or token.startswith("bytes:")


def test_zero_logprobs_are_the_chosen_tokens_alone(sdk, model):
    logprobs = sdk.completions.create(model=model, prompt="x", max_tokens=4, logprobs=0).choices[0].logprobs
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]


def test_no_logprobs_unless_asked_for(sdk, model):
    assert sdk.completions.create(model=model, prompt="x", max_tokens=4).choices[0].logprobs is None


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(sdk, model, tokenizer):
    common = {"model": model, "prompt": "x", "seed": 11, "max_tokens": 30, "logprobs": 0}
    whole = sdk.completions.create(**common).choices[0]
    pieces = [token_bytes(token) for token in whole.logprobs.tokens]
    stop_id = tokenizer.vocabulary.token_bytes.index(pieces[9])
    choice = sdk.completions.create(**common, extra_body={"stop_token_ids": [stop_id]}).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs.tokens == whole.logprobs.tokens[:9]
    assert choice.text == b"".join(pieces[:9]).decode(errors="replace")


@pytest.mark.parametrize("extra", [{"top_k": 5}, {"min_p": 0.1}, {"ignore_eos": True}, {"top_k": -1}, {"priority": 1}])
def test_parameters_beyond_openai_are_taken(sdk, model, extra):
    completion = sdk.completions.create(model=model, prompt="x", max_tokens=3, extra_body=extra)
    assert completion.usage.completion_tokens == 3


def test_all_sampling_parameters_at_once(sdk, model):
    completion = sdk.completions.create(
        model=model,
        prompt="x",
        temperature=0.7,
        top_p=0.9,
        logit_bias={"17": -100, "18": 5.5},
        max_tokens=3,
        user="someone",
        best_of=1,
        echo=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        extra_body={"top_k": 5, "min_p": 0.1, "min_tokens": 2},
    )
    assert completion.usage.completion_tokens == 3


def test_a_thousand_samples_of_one_prompt(sdk, model):
    completion = sdk.completions.create(model=model, prompt="x", n=1024, seed=1, max_tokens=4)
    assert len(set(texts(completion))) > 1000
    assert completion.usage.completion_tokens == 4096


async def test_the_async_sdk_works_as_well(deployment, model):
    async with deployment.async_sdk() as client:
        completion = await client.completions.create(model=model, prompt="x", max_tokens=5)
    assert completion.usage.completion_tokens == 5


def test_tokens_are_written_as_ids(deployment):
    """TRL's client reads them."""
    common = {"max_tokens": 4, "seed": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = deployment.complete(prompt="x", logprobs=2, **common).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    [choice] = deployment.post("/v1/chat/completions", chat | common).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")
