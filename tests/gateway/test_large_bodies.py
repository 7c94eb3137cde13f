"""Bodies that are large, or made to be expensive: refused by their first error, and legitimate ones answered."""

import json

import orjson
import pytest
from pydantic import ValidationError

from services.common.json_scan import MAX_VALUES
from services.gateway.anthropic.body import MessagesBody
from services.gateway.openai.body import Body, UnknownNames
from services.gateway.openai.parse import ignored_header, parse
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.responses.conversations import ConversationCreateBody
from services.gateway.openai.schemas import ChatBody, CompletionBody
from services.gateway.openai.tokens import TokenizeBody

PARTS = [1] * 4096
USER = {"role": "user", "content": "Hi"}


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (ChatBody, {"messages": [1] * 60_000}),
        (ChatBody, {"messages": [{"role": "user", "content": PARTS}] * 10}),
        (ChatBody, {"messages": [USER], "tools": [{}] * 1000}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}] * 1000}] * 10}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(token): "x" for token in range(60_000)}}),
        (CompletionBody, {"prompt": "a", "metadata": {str(number): 1 for number in range(60_000)}}),
        (CompletionBody, {"prompt": "a", "guided_choice": [1] * 60_000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 60_000}),
        (ResponsesBody, {"input": [{"role": "user", "content": PARTS}] * 10}),
        (ResponsesBody, {"input": [{}] * 60_000}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": PARTS}] * 10}),
        (MessagesBody, {"max_tokens": 1, "messages": [USER], "system": [{}] * 4000}),
        (TokenizeBody, {"messages": [{}] * 60_000}),
        (ConversationCreateBody, {"items": [{}] * 60_000}),
    ],
)
def test_validation_ends_at_the_first_wrong_item(kind, document):
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(document)
    assert refusal.value.error_count() < 20


def test_a_body_of_millions_of_wrong_parts_is_refused_by_the_first(deployment):
    chat = "/v1/chat/completions"
    wrong = error_of(deployment.post(chat, {"messages": [{"role": "user", "content": [1] * 4096}] * 20}), 400)
    assert wrong["param"] == "messages[0].content[0]"
    many = error_of(deployment.post(chat, {"messages": [{"role": "user", "content": [1] * 4096}] * 40}), 400)
    assert (many["param"], many["code"]) == ("messages", "too_many_values")
    assert str(MAX_VALUES) in many["message"]


def test_many_prompts_of_token_ids_are_answered(deployment):
    prompts = [[20 + number % 1000] * 60 for number in range(1024)]
    assert len(json.dumps(prompts)) > 128 * 1024
    response = deployment.complete(prompt=prompts, max_tokens=1)
    assert len(response.json()["choices"]) == 1024


def test_a_long_list_of_token_ids_is_refused_for_its_length_alone(deployment):
    assert error_of(deployment.complete(prompt=[50] * 300_000), 400)["code"] == "context_length_exceeded"
    wrong = error_of(deployment.complete(prompt=[*[50] * 300_000, True]), 400)
    assert (wrong["param"], "True" in wrong["message"]) == ("prompt", True)


def test_many_texts_are_answered(deployment):
    prompts = [f"{number} sheep, and {'é🙂' * 20}" for number in range(2000)]
    response = deployment.complete(prompt=prompts, max_tokens=1)
    assert len(response.json()["choices"]) == 2000


def test_arguments_of_calls_are_bounded_as_bodies_are(deployment):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * MAX_VALUES + "[]]"}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    assert error_of(deployment.post("/v1/chat/completions", body), 400)["param"] == "messages"


def test_values_of_unknown_parameters_are_dropped_and_their_names_are_told():
    message = {**USER, "more": [[]] * 100, "id": "m1"}
    body = parse(orjson.dumps({"messages": [message], "unknown": {"a": [1] * 100}, "x" * 99: 1}), ChatBody)
    assert body.model_extra == {"unknown": (...,), "x" * 64: 1}
    assert body.messages[0].model_extra == {"more": (...,), "id": "m1"}
    assert ignored_header(body)["x-toka-ignored-params"] == f"unknown,{'x' * 64},messages.more,messages.id"


def test_few_names_of_unknown_parameters_are_kept_but_for_those_that_count():
    raw = {"messages": [{**USER, **{str(name): 1 for name in range(3000)}}] * 3}
    body = ChatBody.model_validate(raw, context=UnknownNames(10))
    assert sum(len(message.model_extra) for message in body.messages) == 10
    with pytest.raises(ValidationError, match="audio"):
        ChatBody.model_validate({"messages": [{**USER, "a": 1, "audio": {"id": "x"}}]}, context=UnknownNames(0))


def test_tools_keep_what_the_model_is_shown():
    function = {"name": "f", "returns": {"type": "string"}}
    body = parse(orjson.dumps({"messages": [USER], "tools": [{"type": "function", "function": function}]}), ChatBody)
    assert body.tools[0].render()["function"] == function


def test_each_list_of_each_body_ends_at_its_first_error():
    def bodies(kind: type[Body]):
        for each in kind.__subclasses__():
            yield each
            yield from bodies(each)

    def lists(part):
        if isinstance(part, dict):
            if part.get("type") == "list":
                yield part
            for each in part.values():
                yield from lists(each)
        elif isinstance(part, list | tuple):
            for each in part:
                yield from lists(each)

    for kind in bodies(Body):
        assert all(part.get("fail_fast") for part in lists(kind.__pydantic_core_schema__)), kind
