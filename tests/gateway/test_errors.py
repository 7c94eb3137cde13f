"""Whatever a client sends, it gets an answer that names what was wrong: never a 500, never silence."""

from typing import get_type_hints

import httpx
import openai
import pytest
from openai.types import chat, completion_create_params

from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.schemas import ChatBody, CompletionBody
from services.gateway.openai.unsupported import HARMLESS, UNSUPPORTED
from tests.gateway.deployment import PATIENCE_S

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_json_object(deployment, path, body):
    assert error_of(deployment.post(path, body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "value", ['"prompt": 1, "n": DEEP', '"prompt": [DEEP]', '"prompt": "x", "logit_bias": {"5": DEEP}']
)
def test_a_value_that_is_nested_too_deeply_to_be_shown(deployment, value):
    deep = "[" * 1000 + "]" * 1000
    error_of(deployment.post(COMPLETIONS, f"{{{value.replace('DEEP', deep)}}}".encode()), 400)


@pytest.mark.parametrize(("name", "other"), [("n", "best_of"), ("stop", "stop_sequences"), ("seed", "random_seed")])
def test_values_that_are_nested_too_deeply_to_be_compared_are_rejected(deployment, name, other):
    deep = "[" * 1000 + "]" * 1000
    body = f'{{"prompt": "x", "{name}": {deep}, "{other}": {deep}}}'
    assert error_of(deployment.post(COMPLETIONS, body.encode()), 400)["param"] == other


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": "3"}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 20_000}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": [1]}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"seed": "a"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"stop": "a" * 5000}, "stop"),
        ({"stop_token_ids": [5] * 5000}, "stop_token_ids"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}, "n": 600}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"return_token_ids": "no"}, "return_token_ids"),
        ({"skip_special_tokens": False, "stop": "x"}, "skip_special_tokens"),
        ({"user": 5}, "user"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"model": 5}, "model"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_wrong_value_is_named(deployment, path, body, param):
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    error = error_of(deployment.post(path, prompt | body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": ["x"] * 10_000, "n": 2}, "n"),
        ({"prompt": ["x"] * 10_000, "best_of": 2}, "best_of"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt": "x", "echo": "yes"}, "echo"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncate_prompt_tokens": 2048}, "truncate_prompt_tokens"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ],
)
def test_a_wrong_completion_request(deployment, body, param):
    assert error_of(deployment.post(COMPLETIONS, body), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": 1}, "logprobs"),
        ({"messages": MESSAGES * 70_000}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]}, "messages[0].content"),
    ],
)
def test_a_wrong_chat_request(deployment, body, param):
    assert error_of(deployment.post(CHAT, body), 400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": "end"},
        {"top_logprobs": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"reasoning_effort": "high"},
        {"stop_regex": ["[0-9]+"]},
        {"no_repeat_ngram_size": 2},
        {"prompt_embeds": "AAAA"},
        {"max_output_tokens": 5},
    ],
)
def test_a_known_completion_parameter_not_supported_yet(deployment, body):
    error = error_of(deployment.complete(prompt="x", **body), 400)
    assert (error["param"], error["code"]) == (next(iter(body)), "unsupported_parameter")


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"watermark": True},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "high"},
        {"prediction": {"type": "content", "content": "x"}},
        {"best_of": 3},
        {"echo": True},
        {"suffix": "end"},
        {"include_reasoning": False},
        {"spaces_between_special_tokens": False},
        {"thinking_token_budget": 5},
        {"logprob_token_ids": [5]},
        {"structural_tag": "{}"},
        {"kv_transfer_params": {"a": 1}},
        {"lora_path": "x"},
        {"max_output_tokens": 5},
        {"instructions": "Be brief."},
        {"previous_response_id": "resp_1"},
        {"reasoning": {"effort": "high"}},
        {"text": {"format": {"type": "json_object"}}},
    ],
)
def test_a_known_chat_parameter_not_supported_yet(deployment, body):
    error = error_of(deployment.chat(**body), 400)
    assert (error["param"], error["code"]) == (next(iter(body)), "unsupported_parameter")


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [(completion_create_params, CompletionBody), (chat.completion_create_params, ChatBody)],
)
def test_every_parameter_of_the_sdk_is_honoured_or_refused_or_harmless(parameters, schema):
    known = set(get_type_hints(parameters.CompletionCreateParamsNonStreaming))
    assert known - schema.model_fields.keys() - UNSUPPORTED.keys() - HARMLESS == set()


@pytest.mark.parametrize("schema", [CompletionBody, ChatBody, ResponsesBody])
def test_what_one_endpoint_has_the_others_do_not_ignore(schema):
    begin = {"prompt", "input", "messages"}  # without its own no endpoint answers
    here = schema.model_fields.keys() | schema.elsewhere.keys() | UNSUPPORTED.keys()
    there = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    assert there - begin - here == set()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_changes_nothing_passes(deployment, path):
    neutral = {"include_reasoning": True, "spaces_between_special_tokens": True, "return_tokens_as_token_ids": False}
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    response = deployment.post(path, body | neutral | {"structural_tag": None, "max_tokens": 2})
    assert response.status_code == 200, response.text
    assert "x-toka-ignored-params" not in response.headers


def test_more_parameters_than_anybody_has(deployment):
    error_of(deployment.complete(prompt="x", **{f"p{number}": 1 for number in range(2000)}), 400)


def test_a_stop_string_that_no_scheduler_would_read_disturbs_nobody(deployment, sdk, model):
    stream = sdk.completions.create(model=model, prompt="x", max_tokens=1500, stream=True)
    next(iter(stream))
    assert error_of(deployment.complete(prompt="x", stop="a" * 20_000_000), 400)["param"] == "stop"
    assert list(stream)[-1].choices[0].finish_reason == "length"


def test_unknown_parameters_are_ignored_and_listed(deployment):
    response = deployment.complete(prompt="x", max_tokens=2, flavour=1, **{"größe\n": None})
    assert response.status_code == 200
    assert response.headers["x-toka-ignored-params"] == "flavour,gr%C3%B6%C3%9Fe%0A"
    message = {"role": "user", "content": "x", "mood": "good"}
    response = deployment.chat(messages=[message], max_tokens=2, stream=True, colour="red", user="me")
    assert set(response.headers["x-toka-ignored-params"].split(",")) == {"colour", "messages.mood"}
    assert "x-toka-ignored-params" not in deployment.chat(max_tokens=2, metadata={"a": "b"}).headers


def test_the_sdk_raises_its_own_errors(sdk, model):
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="'n'"):
        sdk.completions.create(model=model, prompt="x", n=0)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=model, prompt=[1] * 5000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[5] * 2048, [5] * 100_000, "word " * 4000, "x" * 5_000_000, ["ok", "word " * 4000]])
def test_a_prompt_longer_than_the_context(deployment, prompt):
    error = error_of(deployment.complete(prompt=prompt), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, your prompt")
    assert error["message"].endswith("Please reduce the length of the prompt.")


@pytest.mark.parametrize("content", ["word " * 4000, "x" * 5_000_000])
def test_a_conversation_longer_than_the_context(deployment, content):
    error = error_of(deployment.chat(messages=[{"role": "user", "content": content}]), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, your messages")
    assert error["message"].endswith("Please reduce the length of the messages.")


def test_a_body_beyond_the_limit(deployment):
    big = b" " * (33 * 1024 * 1024)
    assert error_of(deployment.post(COMPLETIONS, big), 413)["code"] == "payload_too_large"

    def in_chunks():
        for start in range(0, len(big), 1 << 20):
            yield big[start : start + (1 << 20)]

    assert error_of(
        httpx.post(deployment.url + COMPLETIONS, content=in_chunks(), headers=JSON, timeout=PATIENCE_S), 413
    )


@pytest.mark.parametrize(
    "path",
    [COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize", "/v1/batches", "/v1/chat/completions/batch"],
)
def test_a_body_that_is_not_said_to_be_json(deployment, path):
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/jsonp"}, {}):
        response = httpx.post(deployment.url + path, content=b"{}", headers=headers, timeout=PATIENCE_S)
        error = error_of(response, 415)
        assert (error["code"], "Content-Type: application/json" in error["message"]) == ("unsupported_media_type", True)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_each_way_to_say_json(deployment, kind):
    content = b'{"prompt": "x", "max_tokens": 1}'
    assert httpx.post(deployment.url + COMPLETIONS, content=content, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/v1/v1/messages", "/v1/messages"),  # Anthropic's SDK, with a base URL that has it
        ("/v1/ready", "/ready"),
    ],
)
def test_a_wrong_base_url_is_named(deployment, path, meant):
    message = deployment.post(path, {}).json()["error"]["message"]
    assert message == f"there is no POST {path} here; did you mean {meant}? Check the client's base URL"


def test_a_path_or_method_that_does_not_exist(deployment):
    assert error_of(httpx.get(deployment.url + "/v2/else"), 404)["code"] == "unknown_url"
    response = httpx.get(deployment.url + COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
