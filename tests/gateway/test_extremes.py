"""Numbers beyond any field of the contract: an answer, or a 400 that names the parameter."""

import json

import httpx
import pytest

from services.gateway.anthropic.body import MessagesBody
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.schemas import ChatBody, CompletionBody
from services.gateway.openai.tokens import DetokenizeBody
from tests.gateway.deployment import PATIENCE_S
from tests.quick import quick_if

EXTREMES = [-(2**63), -1, 0, 2**31 - 1, 2**31, 2**32, 2**40, 2**64 - 1]
CONTEXT = 2048  # of the deployment's model


@pytest.fixture(scope="module")
def long(tokenizer):
    """A conversation that leaves room for a few tokens: where no limit is said, answers go to the context's end."""
    message = {"role": "user", "content": ""}
    while len(tokenizer.encode_chat([message])) < CONTEXT - 60:
        message["content"] += "word " * 10
    return [message]


def numbers(kind) -> list[str]:
    """Parameters that take an integer, or lists of them."""
    properties = kind.model_json_schema()["properties"]
    return [name for name, schema in properties.items() if '"integer"' in json.dumps(schema)]


def values(name: str, number: int) -> list:
    if name in ("tokens", "stop_token_ids"):
        return [[number]]
    return [[number], [[number, 5]]] if name == "prompt" else [number]


@pytest.mark.parametrize(
    ("path", "kind"),
    quick_if(
        lambda path, kind: kind not in {CompletionBody, ResponsesBody},
        [
            ("/v1/completions", CompletionBody),
            ("/v1/chat/completions", ChatBody),
            ("/v1/responses", ResponsesBody),
            ("/v1/messages", MessagesBody),
            ("/detokenize", DetokenizeBody),
        ],
    ),
)
def test_numbers_beyond_every_field_never_break_the_server(deployment, long, path, kind):
    names = numbers(kind)
    assert {"min_tokens", "seed", "priority"} <= {*names} or names == ["tokens"]
    cases = [(name, value) for name in names for number in EXTREMES for value in values(name, number)]
    if "logit_bias" in kind.model_fields:
        cases += [("logit_bias", {str(number): 1}) for number in EXTREMES]
    cases += [("timeout", number) for number in EXTREMES if "timeout" in kind.model_fields]
    needed = {"prompt": long[0]["content"], "messages": long, "input": long, "tokens": [5], "max_tokens": 2}
    body = {name: needed[name] for name, field in kind.model_fields.items() if field.is_required()}
    with httpx.Client(base_url=deployment.url, timeout=PATIENCE_S) as client:
        for name, value in cases:
            response = client.post(path, json=body | {name: value})
            assert response.status_code in (200, 400), (name, value, response.text)
            if response.status_code == 400 and kind is MessagesBody:  # its errors name the parameter in their message
                assert name in response.json()["error"]["message"], (name, value, response.text)
            elif response.status_code == 400:
                assert response.json()["error"]["param"].startswith(name), (name, value, response.text)


@pytest.mark.parametrize("least", [2000, 2**31 - 1, 2**31, 2**40])
def test_more_tokens_than_the_context_has_left_are_refused(deployment, long, least):
    response = deployment.chat(messages=long, min_tokens=least)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens"), response.text
    assert deployment.chat(messages=long, min_tokens=2).json()["usage"]["total_tokens"] == CONTEXT
