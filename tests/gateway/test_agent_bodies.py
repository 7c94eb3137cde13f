"""What coding agents send to ``/v1/responses``, through the official SDK. The model says what the user said."""

import json

import httpx
import openai
import pytest

from services.gateway.openai.json_value import MAX_DEPTH
from tests.gateway.deployment import PATIENCE_S
from tests.gateway.test_errors import error_of
from tests.gateway.test_responses import WEATHER, raw_events, respond
from tests.gateway.test_responses import client as client
from tests.gateway.test_responses import name as name
from tests.gateway.test_tools import CALL, THOUGHT, TOOLS

PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'}
SHELL = {"type": "local_shell"}
DOCS = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Finds documentation.",
    "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": False}],
}
WEB = {"type": "web_search", "external_web_access": False}
# As Codex has it for a model that it does not know.
CODEX = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
    ],
    "tools": [WEATHER, PATCH | {"format": LARK}, DOCS, SHELL, WEB],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-a",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def calling(name: str, **arguments) -> str:
    """What a user says for the model to call a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def test_a_body_of_codex_is_answered_and_what_it_leaves_out_is_listed(qwen):
    response = respond(qwen, **CODEX)
    assert response.status_code == 200, response.text
    told = response.json()
    assert told["output"][0]["content"][0]["text"] == "Hello."
    assert [tool["type"] for tool in told["tools"]] == ["function", "custom", "namespace", "local_shell"]
    assert told["reasoning"] == {"effort": None, "summary": "auto"}
    ignored = response.headers["x-toka-ignored-params"].split(",")
    assert {"tools.web_search", "tools.format", "client_metadata"} <= {*ignored}


def test_a_custom_tool_is_called_with_a_text(client, name):
    said = calling("apply_patch", input='*** Begin "Patch"\n+Köln')
    with client.responses.stream(model=name, input=said, tools=[PATCH]) as stream:
        events = list(stream)
        response = stream.get_final_response()
    [call] = response.output
    assert (call.type, call.name, call.input, call.status) == (
        "custom_tool_call", "apply_patch", '*** Begin "Patch"\n+Köln', "completed",
    )  # fmt: skip
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert (done.input, done.item_id) == (call.input, call.id)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "patched"}
    second = client.responses.create(model=name, input=[result], tools=[PATCH], previous_response_id=response.id)
    assert second.output_text == "patched"
    told = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in told] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert told[1].input == call.input


def test_the_input_of_a_custom_tool_that_is_cut_is_told_as_far_as_it_came(qwen):
    told = respond(qwen, input=calling("apply_patch", input="one two three"), tools=[PATCH], stop=" three").json()
    [call] = told["output"]
    assert (call["input"], call["status"]) == ("one two", "incomplete")


def test_the_input_of_a_custom_tool_is_held_to_a_regular_expression(qwen):
    tool = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
    told = respond(qwen, input=calling("apply_patch", input="abc"), tools=[tool]).json()
    assert told["output"][0]["input"] == "abc"
    refused = respond(qwen, input=calling("apply_patch", input="ABC"), tools=[tool])
    assert refused.status_code != 200 or refused.json()["output"][0].get("input") != "ABC"


def test_tools_of_a_namespace_are_called_by_their_own_name(client, name):
    said = calling("mcp__docs__search", query="x")
    response = client.responses.create(model=name, input=said, tools=[DOCS], store=False)
    [call] = response.output
    assert (call.name, call.namespace, json.loads(call.arguments)) == ("search", "mcp__docs", {"query": "x"})
    again = [
        {"role": "user", "content": said},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "found"}]},
    ]
    assert client.responses.create(model=name, input=again, tools=[DOCS]).output_text == "found"


def test_the_model_reads_the_description_of_a_namespace(client, name):
    counts = [
        client.responses.input_tokens.count(model=name, input="Hi", tools=[DOCS | {"description": text}]).input_tokens
        for text in ("", "Finds documentation of every library.")
    ]
    assert counts[0] < counts[1]


def test_the_local_shell_is_called_with_a_command(client, name):
    said = calling("local_shell", command=["ls", "-l"], timeout_ms=5)
    response = client.responses.create(model=name, input=said, tools=[SHELL])
    [call] = response.output
    assert (call.type, call.action.command, call.action.timeout_ms) == ("local_shell_call", ["ls", "-l"], 5)
    result = {"type": "local_shell_call_output", "id": call.call_id, "output": "total 0"}
    second = client.responses.create(model=name, input=[result], tools=[SHELL], previous_response_id=response.id)
    assert second.output_text == "total 0"
    assert len(client.responses.input_items.list(second.id).data) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEB]}, "tools[0].type"),
        ({"tools": [WEB, {"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "teleport"}]}, "tools[1].type"),
        ({"tools": [WEATHER, WEB], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER | {"name": "mcp__docs__search"}, DOCS]}, "tools"),
        ({"tools": [DOCS | {"name": "n" * 60}]}, "tools[0]"),
        ({"tools": [PATCH | {"format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_honoured_is_named(qwen, body, param):
    assert error_of(respond(qwen, **body), 400)["param"] == param


def test_reasoning_goes_on_by_its_encrypted_content(client, name, qwen):
    include = ["reasoning.encrypted_content"]
    first = client.responses.create(model=name, input=THOUGHT + "One", store=False, include=include)
    thought, said = (item.to_dict() for item in first.output)
    del thought["content"]  # as Codex sends it
    assert thought["encrypted_content"]
    again = [{"role": "user", "content": THOUGHT + "One"}, thought, said, {"role": "user", "content": "Two"}]
    second = client.responses.create(model=name, input=again, store=False)
    messages = [
        {"role": "user", "content": THOUGHT + "One"},
        {"role": "assistant", "content": "One", "reasoning_content": "Is it cold?"},
        {"role": "user", "content": "Two"},
    ]
    assert second.usage.input_tokens == qwen.post("/tokenize", {"messages": messages}).json()["count"]
    plain = client.responses.create(model=name, input=THOUGHT + "One", store=False)
    assert plain.output[0].encrypted_content is None


def test_variables_of_the_chat_template_may_be_given(qwen):
    def tokens(**body) -> int:
        return respond(qwen, **body).json()["usage"]["input_tokens"]

    assert tokens(chat_template_kwargs={"enable_thinking": False}) > tokens()
    ignored = respond(qwen, chat_template_kwargs={"mood": 1}).headers["x-toka-ignored-params"]
    assert ignored == "chat_template_kwargs.mood"


OTHER = WEATHER | {"name": "clock"}


def allowed(*names: str, mode: str = "auto") -> dict:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": each} for each in names]}


def test_only_allowed_tools_are_called(client, name, qwen):
    both = {"model": name, "input": CALL, "tools": [WEATHER, OTHER]}
    [call] = client.responses.create(**both, tool_choice=allowed("weather")).output
    assert (call.type, call.name) == ("function_call", "weather")
    [said] = client.responses.create(**both, tool_choice=allowed("clock"), max_output_tokens=20).output
    assert getattr(said, "name", "clock") == "clock"
    told = respond(qwen, tools=[WEATHER, OTHER], tool_choice=allowed("clock")).json()
    assert told["tool_choice"] == allowed("clock")
    assert len(told["tools"]) == 2
    error = error_of(respond(qwen, tools=[WEATHER], tool_choice=allowed("clock")), 400)
    assert error["param"] == "tool_choice"
    assert error_of(respond(qwen, tools=[WEATHER, WEB], tool_choice=allowed("clock", "x")), 400)


def test_one_of_the_allowed_tools_must_be_called(qwen):
    body = {"tools": [WEATHER, OTHER], "tool_choice": allowed("weather", mode="required")}
    assert respond(qwen, input=CALL, **body).json()["output"][0]["name"] == "weather"
    assert respond(qwen, input="No.", **body).json().get("output", [{}])[0].get("type") != "message"


def test_allowed_tools_of_chat_completions(client, name, qwen):
    def choice(*names: str) -> dict:
        tools = [{"type": "function", "function": {"name": each}} for each in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}

    said = {"model": name, "messages": [{"role": "user", "content": CALL}], "tools": TOOLS}
    names = [tool["function"]["name"] for tool in TOOLS]
    [called] = client.chat.completions.create(**said, tool_choice=choice("weather")).choices
    assert called.finish_reason == "tool_calls"
    others = [each for each in names if each != "weather"]
    [left] = client.chat.completions.create(**said, tool_choice=choice(*others), max_tokens=20).choices
    assert "weather" not in [call.function.name for call in left.message.tool_calls or ()]
    with pytest.raises(openai.BadRequestError, match="there is no tool 'ghost'") as caught:
        client.chat.completions.create(**said, tool_choice=choice("ghost"))
    assert caught.value.param == "tool_choice"


def test_input_tokens_are_those_of_the_prompt(client, name, qwen):
    given = {"instructions": "Be brief.", "tools": [WEATHER], "input": "Hi"}
    counted = client.responses.input_tokens.count(model=name, **given)
    assert counted.object == "response.input_tokens"
    made = client.responses.create(model=name, **given)
    assert counted.input_tokens == made.usage.input_tokens
    going_on = {"input": "More", "previous_response_id": made.id}
    counted = client.responses.input_tokens.count(model=name, **going_on)
    assert counted.input_tokens == client.responses.create(model=name, **going_on).usage.input_tokens
    refused = httpx.post(f"{qwen.url}/v1/responses/input_tokens", json={"input": None}, timeout=PATIENCE_S)
    assert error_of(refused, 400)["param"] == "input"


def test_input_tokens_of_a_prompt_beyond_the_context_are_counted(client, name):
    assert client.responses.input_tokens.count(model=name, input="word " * 4000).input_tokens > 2048


def test_a_stored_item_may_be_referred_to(client, name):
    first = client.responses.create(model=name, input=CALL, tools=[WEATHER])
    [call] = first.output
    again = [
        {"role": "user", "content": CALL},
        {"type": "item_reference", "id": call.id},
        {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"},
    ]
    second = client.responses.create(model=name, input=again, tools=[WEATHER])
    assert second.output_text == "9 degrees"
    whole = [again[0], call.to_dict(), again[2]]
    third = client.responses.create(model=name, input=whole, tools=[WEATHER])
    assert second.usage.input_tokens == third.usage.input_tokens
    [told] = [item for item in client.responses.input_items.list(second.id).data if item.type == "function_call"]
    assert told.arguments == call.arguments
    last = [{"id": item.id} for item in client.responses.input_items.list(second.id, order="asc").data]
    fourth = client.responses.create(model=name, input=last[2:], previous_response_id=second.id, tools=[WEATHER])
    assert fourth.output_text == "9 degrees"


def test_a_reference_to_what_is_not_stored_is_refused_by_its_place(client, name):
    gone = client.responses.create(model=name, input="Hi", store=False).output[0].id
    for reference in (gone, "msg_1", "rs_" + "0" * 36):
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]: there is no stored item") as caught:
            client.responses.create(model=name, input=[{"role": "user", "content": "x"}, {"id": reference}])
        assert (caught.value.param, caught.value.code) == ("input[1]", "item_not_found")


def test_items_of_a_stream_have_the_ids_that_references_lead_by(qwen, client, name):
    events = raw_events(qwen, input=THOUGHT + "One")
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert len(set(added)) == 2
    reference = {"type": "item_reference", "id": added[1]}
    going_on = client.responses.create(model=name, input=[reference, {"role": "user", "content": "Two"}])
    assert going_on.output_text == "Two"


FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([FUNCTION | {"x": "DEEP"}], "auto", "tools[0].x"),
        ([DOCS | {"tools": [FUNCTION | {"x": "DEEP"}]}], "auto", "tools[0].tools[0].x"),
        (
            [FUNCTION],
            {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION | {"x": "DEEP"}]},
            "tool_choice.tools[0].x",
        ),
    ],
    ids=["function", "namespace", "allowed tools"],
)
def test_unknown_members_of_tools_are_rejected_if_they_are_nested_too_deeply(qwen, tools, choice, param, stream):
    body = json.dumps({"input": "Hi", "tools": tools, "tool_choice": choice, "stream": stream})

    def ask(levels: int) -> httpx.Response:
        return qwen.post("/v1/responses", body.replace('"DEEP"', "[" * levels + "]" * levels).encode())

    error = error_of(ask(2 * MAX_DEPTH), 400)
    assert (error["param"], f"{MAX_DEPTH} levels" in error["message"]) == (param, True)
    assert "[" * MAX_DEPTH in ask(MAX_DEPTH).raise_for_status().text
