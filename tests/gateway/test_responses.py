"""``/v1/responses`` through the official SDK. The model says what the user said."""

import json
from typing import get_type_hints

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import response_create_params

from services.common.errors import InvalidRequest
from services.gateway.openai.messages import MAX_MESSAGES
from services.gateway.openai.parse import parse
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.unsupported import HARMLESS, UNSUPPORTED
from tests.gateway.deployment import PATIENCE_S
from tests.gateway.test_errors import error_of
from tests.gateway.test_fuzz import values
from tests.gateway.test_tools import CALL, THOUGHT
from tests.properties import examples

WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": None, "strict": False}


@pytest.fixture
def client(qwen):
    with qwen.sdk() as made:
        yield made


@pytest.fixture(scope="module")
def name(qwen):
    with qwen.sdk() as made:
        return made.models.list().data[0].id


def respond(deployment, **body) -> httpx.Response:
    return deployment.post("/v1/responses", {"input": "Hi"} | body)


def raw_events(deployment, headers: dict[str, str] | None = None, **body) -> list[dict]:
    """Each checked to be named as its data is."""
    url, asked = deployment.url + "/v1/responses", {"input": "Hi", "stream": True} | body
    with httpx.stream("POST", url, json=asked, headers=headers, timeout=PATIENCE_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    told = []
    for event in raw.removesuffix("\n\n").split("\n\n"):
        head, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def without_ids(item: dict) -> dict:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_a_text_is_answered(client, name):
    response = client.responses.create(model=name, input="Yes, we can.", metadata={"a": "b"}, user="me")
    assert (response.object, response.status, response.model) == ("response", "completed", name)
    assert response.id.startswith("resp")
    assert response.output_text == "Yes, we can."
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert response.metadata == {"a": "b"}
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert set(response.usage.timing) == {"queue_ms", "prefill_ms", "decode_ms"}


def test_instructions_and_items_are_the_conversation(client, name, qwen):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning_content": "Hm."},
        {"role": "user", "content": "Three"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {"role": "user", "content": "Three"},
    ]
    response = client.responses.create(model=name, instructions="Be brief.", input=items)
    assert response.output_text == "Three"
    assert response.instructions == "Be brief."
    count = qwen.post("/tokenize", {"messages": messages}).json()["count"]
    assert response.usage.input_tokens == count


def test_an_answer_that_is_cut_is_incomplete(client, name, qwen):
    response = client.responses.create(model=name, input="Yes, we can do this.", max_output_tokens=3, temperature=0)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3
    assert raw_events(qwen, max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_the_events_of_a_text(qwen):
    told = raw_events(qwen, input="Yes, we can.")
    kinds = [event["type"] for event in told]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in told if event["type"].endswith("delta")) == "Yes, we can."
    assert told[-4]["text"] == "Yes, we can."
    assert told[-1]["response"]["output"] == [told[-2]["item"]]
    assert told[0]["response"]["output"] == []


@pytest.mark.parametrize("text", ["", "Yes.", THOUGHT + "Yes.", f"So: {CALL}{CALL}", THOUGHT + CALL, "<tool_call>no"])
def test_a_stream_ends_as_the_whole_answer_is(qwen, text):
    body = {"input": [{"role": "user", "content": text}], "tools": [WEATHER]}
    whole = respond(qwen, **body).json()
    last = raw_events(qwen, **body)[-1]["response"]
    assert [without_ids(item) for item in last["output"]] == [without_ids(item) for item in whole["output"]]
    differing = {name: last["usage"][name] for name in ("input_tokens_details", "timing")}
    assert last["usage"] == whole["usage"] | differing
    assert last.keys() == whole.keys()


def test_the_sdks_stream_helper_follows(client, name):
    with client.responses.stream(model=name, input=THOUGHT + "Let me see. " + CALL, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta"} < kinds
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} < kinds
    thoughts, message, call = response.output
    assert thoughts.content[0].text == "Is it cold?"
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Köln"}')
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_the_async_sdk_streams(qwen, name):
    async with qwen.async_sdk() as client:
        stream = await client.responses.create(model=name, input="Yes, we can.", stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert text == "Yes, we can."


def test_the_result_of_a_call_is_answered(client, name, qwen):
    first = client.responses.create(model=name, input=f"{CALL}{CALL}", tools=[WEATHER])
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{number} degrees"}
        for number, call in enumerate(first.output)
    ]
    items = [{"role": "user", "content": "Cold?"}, *first.output, *results]
    second = client.responses.create(model=name, input=items, tools=[WEATHER])
    assert second.output_text == "1 degrees"
    calls = [
        {"id": "x", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in first.output
    ]
    tool = {"type": "function", "function": {"name": "weather", "description": "Tells it."}}
    messages = [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x", "content": "0 degrees"},
        {"role": "tool", "tool_call_id": "x", "content": "1 degrees"},
    ]
    assert second.usage.input_tokens == qwen.post("/tokenize", {"messages": messages, "tools": [tool]}).json()["count"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "word " * 4000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "climate"}}, "tool_choice"),
        ({"tools": [WEATHER | {"strict": "yes"}]}, "tools[0].strict"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": "resp_\0"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": "yes"}, "store"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"include": ["web_search_call.action.sources"]}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ({"top_k": "x"}, "top_k"),
        ({"stop": 5}, "stop"),
        ({"mood": "x", "logprobs": False, "tools": 1}, "tools"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_named(qwen, body, param):
    assert error_of(respond(qwen, **body), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "instead"),
    [
        ({"max_tokens": 3}, "max_output_tokens"),
        ({"max_completion_tokens": 3}, "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "text.format"),
        ({"guided_json": {}}, "text.format"),
        ({"grammar": "root ::= x"}, "text.format"),
        ({"max_new_tokens": 3}, "max_output_tokens"),
        ({"repeat_penalty": 1.2}, "repetition_penalty"),
        ({"structured_outputs": {"regex": "x"}}, "text.format"),
        ({"logprobs": True}, "include=['message.output_text.logprobs']"),
        ({"reasoning_effort": "high"}, "reasoning.effort"),
        ({"messages": []}, "input"),
        ({"n": 2}, "leave it out or set it to 1"),
        ({"return_token_ids": True}, "leave it out"),
        ({"prompt_logprobs": 1}, "leave it out"),
    ],
)
def test_what_other_endpoints_have_is_refused_with_what_stands_for_it(qwen, body, instead):
    error = error_of(respond(qwen, **body), 400)
    assert (error["param"], error["code"]) == (next(iter(body)), "unsupported_parameter")
    assert instead in error["message"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"min_tokens": 9, "max_output_tokens": 8}, "max_output_tokens=8"),
        ({"min_tokens": 1, "text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
def test_an_error_speaks_of_parameters_by_their_names_here(deployment, body, name):
    assert name in error_of(respond(deployment, **body), 400)["message"]


def test_an_answer_is_sampled_as_it_is_asked(deployment):
    body = {"seed": 3, "top_k": 40, "min_p": 0.01, "logit_bias": {"5": 1}, "frequency_penalty": 0.5, "min_tokens": 2}
    body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1, "stop_token_ids": [7], "ignore_eos": True}
    body |= {"cache_salt": "a", "priority": 1, "n": 1}
    response = respond(deployment, **body, max_output_tokens=40)
    assert response.status_code == 200, response.text
    assert "x-toka-ignored-params" not in response.headers
    [choice] = deployment.chat(**body, max_tokens=40).json()["choices"]
    [message] = response.json()["output"]
    assert message["content"][0]["text"] == choice["message"]["content"]
    asked = ResponsesBody(input="Hi", **body).chat()
    assert {name: getattr(asked, name) for name in body} == body | {"n": None}


def test_a_stop_string_ends_an_answer(qwen):
    response = respond(qwen, input="One, two, three.", stop=[", th"]).json()
    assert (response["output"][0]["content"][0]["text"], response["status"]) == ("One, two", "completed")


@pytest.mark.parametrize("ask", [respond, lambda *given, **body: raw_events(*given, **body)[-1]["response"]])
def test_a_call_that_a_stop_string_cuts_is_incomplete(qwen, ask):
    response = ask(qwen, input=CALL, tools=[WEATHER], stop="ln")
    [call] = (response if isinstance(response, dict) else response.json())["output"]
    assert (call["arguments"], call["status"]) == ('{"city": "Kö', "incomplete")


def test_a_type_that_is_nested_too_deep_to_be_written_out_is_refused():
    raw = b'{"input": [{"type": ' + 1000 * b"[" + 1000 * b"]" + b"}]}"
    with pytest.raises(InvalidRequest) as refused:
        parse(raw, ResponsesBody)
    assert refused.value.field == "input[0]"


def test_neutral_values_pass(client, name):
    response = client.responses.create(
        model=name,
        input="Hi",
        store=False,
        background=False,
        include=[],
        truncation="disabled",
        top_logprobs=0,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"effort": None},
        tool_choice="auto",
        parallel_tool_calls=True,
        service_tier="auto",
    )
    assert response.output_text == "Hi"


def test_unknown_parameters_are_listed(qwen):
    assert respond(qwen, mood="good").headers["x-toka-ignored-params"] == "mood"


def test_every_parameter_of_the_sdk_is_honoured_or_refused_or_harmless():
    known = set(get_type_hints(response_create_params.ResponseCreateParamsNonStreaming))
    assert known - ResponsesBody.model_fields.keys() - UNSUPPORTED.keys() - HARMLESS == set()


calls = st.fixed_dictionaries(
    {"type": st.just("function_call"), "call_id": st.text(max_size=3)}
) | st.fixed_dictionaries(
    {"type": st.just("function_call"), "call_id": st.just("c"), "name": st.text(max_size=5), "arguments": st.text()}
)
items = st.one_of(
    calls,
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=9)}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": st.just("c"), "output": st.text()}),
    st.just({"type": "reasoning", "summary": []}),
    values,
)
bodies = st.fixed_dictionaries(
    {"input": st.lists(items, max_size=4) | st.text() | values},
    optional={name: values for name in ResponsesBody.model_fields if name not in ("input", "model")}
    | {"tools": st.just([WEATHER]) | values, "stream": st.booleans()},
)


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies)
def test_random_bodies_never_break_the_server(qwen, body):
    response = qwen.post("/v1/responses", {"max_output_tokens": 3} | body)
    assert response.status_code < 500, (body, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    assert '"error":{' not in response.text or response.status_code >= 400, (body, response.text)


@pytest.mark.parametrize("content", ["x", [{"type": "input_text", "text": "x"}]])
def test_an_input_of_too_many_messages_is_refused_by_its_name(qwen, content):
    items = [{"role": "user", "content": content}] * MAX_MESSAGES
    error = error_of(respond(qwen, input=items), 400)
    assert (error["param"], error["code"]) == ("input", "too_many_values")


@pytest.mark.parametrize("priority", [-1, 0, 3])
def test_a_priority_may_be_given(qwen, priority):
    answer = respond(qwen, priority=priority)
    assert answer.status_code == 200
    assert "x-toka-ignored-params" not in answer.headers
    assert error_of(respond(qwen, priority="high"), 400)["param"] == "priority"
