"""``POST /v1/messages`` and ``/v1/messages/count_tokens`` through Anthropic's SDK."""

import asyncio
import json
from typing import Literal

import anthropic
import httpx
import pydantic
import pytest

from tests.gateway.deployment import PATIENCE_S, Deployment
from tests.gateway.messages.conftest import sdk_of
from tests.gateway.test_tools import CALL, THOUGHT

WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 1024}


def saying(text: str, **body) -> dict:
    return {"max_tokens": 200, "messages": [{"role": "user", "content": text}]} | body


def created(client, name, text, **body) -> anthropic.types.Message:
    return client.messages.create(model=name, **saying(text, **body))


def streamed(client, name, text, **body) -> anthropic.types.Message:
    """The same message, put together from a stream by the SDK."""
    with client.messages.stream(model=name, **saying(text, **body)) as stream:
        return stream.get_final_message()


both = pytest.mark.parametrize("ask", [created, streamed])


def blocks(message) -> list[dict]:
    """The content without ids and signatures."""
    left_out = {"id", "signature", "citations", "caller", "toolset_name", "parsed_output"}
    return [{key: value for key, value in block.to_dict().items() if key not in left_out} for block in message.content]


@both
def test_a_text_is_answered(client, name, ask):
    message = ask(client, name, "Yes, we can.", metadata={"user_id": "u" * 600}, system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", name)
    assert message.id.startswith("msg_")
    assert blocks(message) == [{"type": "text", "text": "Yes, we can."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 0
    assert message.usage.cache_creation_input_tokens == 0


@both
def test_the_prefix_cache_shows_in_usage(client, name, ask):
    text = f"{ask.__name__} " * 60
    first, second = ask(client, name, text, max_tokens=2).usage, ask(client, name, text, max_tokens=2).usage
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


@both
def test_an_answer_that_is_cut_says_so(client, name, ask):
    assert ask(client, name, "Yes, we can do this.", max_tokens=2).stop_reason == "max_tokens"


@both
def test_an_answer_that_the_context_cuts_says_so(claude, client, name, ask):
    used = client.messages.count_tokens(model=name, messages=[{"role": "user", "content": "Hi " * 100}]).input_tokens
    body = {"ignore_eos": True}
    message = ask(client, name, "Hi " * 100, max_tokens=4000, extra_body=body)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == 2048 - used


@both
def test_the_stop_sequence_that_ended_an_answer_is_told(client, name, ask):
    message = ask(client, name, "One two three four", stop_sequences=["zero", " three"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    assert blocks(message) == [{"type": "text", "text": "One two"}]


@both
def test_an_empty_answer_has_an_empty_text(client, name, ask):
    message = ask(client, name, "")
    assert blocks(message) == [{"type": "text", "text": ""}]
    assert message.stop_reason == "end_turn"


@both
def test_sampling_parameters_that_the_sdk_passes_on(client, name, ask):
    body = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "seed": 1, "priority": 1, "min_p": 0.1}
    assert blocks(ask(client, name, "Hi", extra_body=body)) == [{"type": "text", "text": "Hi"}]


@both
def test_a_tool_call(client, name, ask):
    message = ask(client, name, f"Let me see.\n{CALL}\n", tools=[WEATHER, CLOCK])
    assert blocks(message) == [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
    ]
    assert message.stop_reason == "tool_use"
    assert message.content[1].id.startswith("toolu_")


@both
def test_several_tool_calls_and_one(client, name, ask):
    text = f"{CALL}\n{CLOCK_CALL}"
    message = ask(client, name, text, tools=[WEATHER, CLOCK])
    assert [block["name"] for block in blocks(message)] == ["weather", "clock"]
    assert len({block.id for block in message.content}) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(client, name, text, tools=[WEATHER, CLOCK], tool_choice=choice)
    assert [block["name"] for block in blocks(message)] == ["weather"]


def test_calls_whose_input_is_cut_or_no_json(client, name):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "day": oops}}\n</tool_call>'
    [block] = created(client, name, text, tools=[WEATHER]).content
    assert block.input == {"INVALID_JSON": '{"city": "Köln", "day": oops}'}
    message = created(client, name, CALL, tools=[WEATHER], stop_sequences=["ln"])
    assert message.content[0].input == {}
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "ln")


@both
@pytest.mark.parametrize("kind", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_that_must_be_called(caller, ask, kind):
    tool = WEATHER | {"input_schema": {"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"]}}
    with sdk_of(caller) as client:
        model = client.models.list().data[0].id
        choice = kind | {"disable_parallel_tool_use": True}
        message = ask(client, model, "Hi", max_tokens=900, tools=[tool], tool_choice=choice)
    assert blocks(message) == [{"type": "tool_use", "name": "weather", "input": {"ok": 1}}]
    assert message.stop_reason == "tool_use"


def test_with_the_choice_none_no_tool_is_called(client, name):
    message = created(client, name, CLOCK_CALL, tools=[CLOCK], tool_choice={"type": "none"})
    assert blocks(message) == [{"type": "text", "text": CLOCK_CALL}]


def test_the_result_of_a_tool_goes_back(client, name):
    """The whole round as the SDK's users write it."""
    asked = {"role": "user", "content": CALL}
    first = client.messages.create(model=name, max_tokens=100, messages=[asked], tools=[WEATHER])
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [{"type": "text", "text": "20 °C"}]}
    turns = [asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model=name, max_tokens=100, messages=turns, tools=[WEATHER])
    assert blocks(second) == [{"type": "text", "text": "20 °C"}]


def test_the_sdks_own_loop_over_tools(client, name):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"20 °C in {city}"

    turns = [{"role": "user", "content": CALL}]
    runner = client.beta.messages.tool_runner(model=name, max_tokens=100, messages=turns, tools=[weather])
    assert runner.until_done().content[0].text == "20 °C in Köln"


def test_the_beta_endpoint(client, name):
    message = client.beta.messages.create(
        model=name,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **saying("Hi"),
    )
    assert message.content[0].text == "Hi"


@both
def test_thinking_comes_first_and_goes_back(client, name, ask):
    message = ask(client, name, f"{THOUGHT}No, it is not.", thinking=THINKING)
    assert blocks(message) == [
        {"type": "thinking", "thinking": "Is it cold?"},
        {"type": "text", "text": "No, it is not."},
    ]
    assert message.content[0].signature
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    turns = [
        {"role": "user", "content": "Hm?"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Sure?"},
    ]
    shorter = [turns[0], turns[1] | {"content": message.content[1:]}, turns[2]]
    counts = [client.messages.count_tokens(model=name, messages=each).input_tokens for each in (turns, shorter)]
    assert counts[0] > counts[1] + 3
    assert client.messages.create(model=name, max_tokens=50, messages=turns).content[0].text == "Sure?"


@both
def test_thinking_may_come_without_its_text(client, name, ask):
    message = ask(client, name, f"{THOUGHT}No.", thinking=THINKING | {"display": "omitted"})
    assert blocks(message) == [{"type": "thinking", "thinking": ""}, {"type": "text", "text": "No."}]
    assert message.content[0].signature


def test_the_template_hears_whether_to_think(client, name):
    messages = [{"role": "user", "content": "Hi"}]
    given = [THINKING, {"type": "adaptive"}, {"type": "disabled"}, anthropic.omit]
    counts = [client.messages.count_tokens(model=name, messages=messages, thinking=each).input_tokens for each in given]
    assert counts[0] == counts[1] > counts[2] == counts[3]


def test_an_answer_goes_on_where_the_assistant_ended(client, name):
    turns = [{"role": "user", "content": "One two three"}, {"role": "assistant", "content": "One"}]
    message = client.messages.create(model=name, max_tokens=50, messages=turns)
    assert blocks(message) == [{"type": "text", "text": " two three"}]


class Price(pydantic.BaseModel):
    dollars: Literal[3, 4]


def test_a_schema_is_held_to(deployment):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}
    with sdk_of(deployment) as client:
        model = client.models.list().data[0].id
        message = created(client, model, "Hi", output_config={"format": form})
        assert type(json.loads(message.content[0].text)["ok"]) is bool
        older = created(client, model, "Hi", extra_body={"output_format": form})
        assert type(json.loads(older.content[0].text)["ok"]) is bool
        with pytest.raises(anthropic.BadRequestError, match="output_format"):
            created(client, model, "Hi", output_config={"format": form}, extra_body={"output_format": form})


def test_the_sdk_parses_an_answer(deployment):
    with sdk_of(deployment) as client:
        model = client.models.list().data[0].id
        parsed = client.messages.parse(model=model, output_format=Price, **saying("Hi", max_tokens=500))
    assert parsed.parsed_output.dollars in (3, 4)


def test_tokens_are_counted_without_a_run(claude, client, name):
    accepted = claude.metric("toka_requests_accepted_total")
    body = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [WEATHER],
    }
    counted = client.messages.count_tokens(model=name, **body).input_tokens
    assert claude.metric("toka_requests_accepted_total") == accepted
    usage = client.messages.create(model=name, max_tokens=2, **body).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert client.messages.count_tokens(model=name, **body | {"tool_choice": {"type": "none"}}).input_tokens < counted
    longer = [{"role": "user", "content": "word " * 20_000}]  # more than the context, and than is parsed on the loop
    assert client.messages.count_tokens(model=name, messages=longer).input_tokens >= 20_000


def test_what_the_model_has_no_use_for_is_listed(deployment):
    body = saying("Hi", max_tokens=2, thinking=THINKING, output_config={"effort": "high"}, mood="good")
    answer = httpx.post(f"{deployment.url}/v1/messages", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    listed = answer.headers["x-toka-ignored-params"].split(",")
    assert {"output_config.effort", "mood"} <= set(listed)


def test_the_models_are_listed_as_each_client_expects(client, claude, name):
    page = client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, name, name)
    [model] = page
    assert (model.type, model.id, model.display_name) == ("model", name, name)
    assert model.created_at.year >= 2026
    assert client.models.retrieve(name).id == name
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nothing")
    with claude.sdk() as openai:
        assert openai.models.list().data[0].object == "model"


def test_a_request_with_a_key_of_its_own_is_repeated_with_the_same_tokens(deployment):
    """The model of this deployment answers at random."""
    with sdk_of(deployment) as client:
        model = client.models.list().data[0].id
        headers = {"idempotency-key": "messages-1"}
        texts = [
            created(client, model, "Hi", max_tokens=20, extra_headers=headers, extra_body={"ignore_eos": True})
            for _ in range(2)
        ]
    assert blocks(texts[0]) == blocks(texts[1])


def test_an_async_client(claude: Deployment, name):
    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=claude.url, api_key="none", max_retries=0) as client:
            message = await client.messages.create(model=name, **saying("Hi"))
        return message.content[0].text

    assert asyncio.run(ask()) == "Hi"
