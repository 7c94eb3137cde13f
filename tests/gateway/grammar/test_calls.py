"""Tools that must be called, and arguments that are what their schema says, from the real worker."""

import json

import pytest

SAY = [{"role": "user", "content": "Hi"}]  # as ``Deployment.chat`` does
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}  # the built-in model finds no end to its thoughts
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/side"}, "steps": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["to", "steps"],
            "additionalProperties": False,
            "$defs": {"side": {"enum": ["left", "right"]}},
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}
NAMED = {"type": "function", "function": {"name": "move"}}


@pytest.fixture(params=["thinker", pytest.param("caller", marks=pytest.mark.slow)])
def server(request):
    """Each of the ways that models write calls in."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def shorter(no_blanks):
    return {"logit_bias": no_blanks, "max_tokens": 300, "temperature": 1, "seed": 3}


def choices(response) -> list[dict]:
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def check(call: dict) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "wait":
        assert arguments == {}
        return
    assert call["function"]["name"] == "move"
    assert arguments.keys() == {"to", "steps"}
    assert arguments["to"] in ("left", "right")
    assert 1 <= arguments["steps"] <= 9


@pytest.mark.slow
def test_a_call_is_required(server, shorter):
    told = choices(server.chat(tools=[MOVE, WAIT], tool_choice="required", n=6, **shorter, **PLAIN))
    ended = [choice for choice in told if choice["finish_reason"] != "length"]
    assert len(ended) > 2
    for choice in ended:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            check(call)


@pytest.mark.slow
def test_a_tool_named_is_called_once(server, shorter):
    body = {"tools": [WAIT, MOVE], "tool_choice": NAMED}
    told = choices(server.chat(**body, n=4, **shorter, **PLAIN))
    for choice in told:
        assert choice["finish_reason"] == "stop"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "move"
        check(call)
    with server.sdk() as client:
        model = client.models.list().data[0].id
        with client.chat.completions.stream(model=model, messages=SAY, **body, **shorter, extra_body=PLAIN) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "stop"
    [call] = streamed.message.tool_calls
    assert call.function.arguments == told[0]["message"]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.slow
def test_without_parallel_calls_there_is_one(server, shorter):
    body = {"tools": [WAIT], "tool_choice": "required", "parallel_tool_calls": False}
    for choice in choices(server.chat(**body, n=4, **shorter, **PLAIN)):
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["arguments"]) == ("tool_calls", "{}")


@pytest.mark.slow
def test_strict_arguments_are_held_to_their_schema_when_the_model_calls_by_itself(server, shorter):
    strict = {"type": "function", "function": MOVE["function"] | {"strict": True}}
    told = choices(server.chat(tools=[strict], n=4, **shorter | {"max_tokens": 40}, **PLAIN))
    assert all(choice["message"]["content"] for choice in told)  # the built-in model calls nothing unasked


@pytest.mark.slow
def test_an_answer_in_a_form_may_be_calls_instead(server, shorter):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2, 3]}}}
    for choice in choices(server.chat(tools=[MOVE, WAIT], response_format=form, n=8, **shorter, **PLAIN)):
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in (1, 2, 3)
        elif choice["finish_reason"] == "tool_calls":
            assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} <= {"move", "wait"}


def test_responses_require_calls_as_well(server):
    flat = {"type": "function", "strict": True, "name": "move", "parameters": MOVE["function"]["parameters"]}
    body = {"input": "x", "tools": [flat], "store": False, "reasoning": {"effort": "none"}}
    for choice in ("required", {"type": "function", "name": "move"}):
        answer = server.post("/v1/responses", body | {"tool_choice": choice, "parallel_tool_calls": False}).json()
        [item] = answer["output"]
        assert (item["type"], item["name"], answer["status"]) == ("function_call", "move", "completed")
        check({"function": {"name": item["name"], "arguments": item["arguments"]}})
