"""Bodies that clients of other engines send: the same meaning under their names, or a refusal that names ours."""

import pytest

from services.gateway.openai.parse import validate
from services.gateway.openai.schemas import CompletionBody
from tests.fakes.model import FakeShape, continuation
from tests.gateway.test_streaming import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BOTH = ({"prompt": "x"}, COMPLETIONS), ({"messages": MESSAGES}, CHAT)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_new_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 30, "min_new_tokens": 20, "stop": "9"}, {"max_tokens": 30, "min_tokens": 20, "stop": "9"}),
        ({"seed": None, "random_seed": 7}, {"seed": 7}),
        ({"stop_sequences": ["9"], "seed": 1}, {"stop": ["9"], "seed": 1}),
        ({"truncate": 2, "max_tokens": 4}, {"truncate_prompt_tokens": 2, "max_tokens": 4}),
        ({"max_new_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
    ],
)
def test_a_name_of_the_same_meaning_works(deployment, theirs, ours):
    for body, path in BOTH:
        answers = [deployment.post(path, {"seed": 1} | body | given) for given in (theirs, ours)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        assert "x-toka-ignored-params" not in answers[0].headers


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"max_new_tokens": 3, "max_tokens": 4}, "max_new_tokens", "another name of 'max_tokens'"),
        ({"max_new_tokens": "many"}, "max_new_tokens", "invalid value for 'max_new_tokens'"),
        ({"do_sample": False}, "do_sample", "send temperature=0"),
        ({"n_predict": 5}, "n_predict", "send max_tokens"),
        ({"repeat_penalty": 1.1}, "repeat_penalty", "send repetition_penalty"),
        ({"logprob_start_len": 0}, "logprob_start_len", "send prompt_logprobs"),
        ({"options": {"seed": 1}}, "options", "members as parameters"),
        ({"format": "json"}, "format", "send response_format"),
        ({"typical_p": 0.9}, "typical_p", "not supported"),
        ({"mirostat": 2}, "mirostat", "not supported"),
    ],
)
def test_a_name_of_a_similar_meaning_is_refused_and_ours_is_named(deployment, body, param, part):
    for start, path in BOTH:
        error = deployment.post(path, start | body).json()["error"]
        assert (error["param"], part in error["message"]) == (param, True), error


def test_names_that_change_nothing_pass(deployment):
    neutral = {"do_sample": True, "typical_p": 1.0, "n_predict": -1, "options": {}, "max_new_tokens": None}
    for start, path in BOTH:
        assert deployment.post(path, start | neutral | {"max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("name", ["prefix", "partial", "images", "audio"])
def test_a_member_of_a_message_that_would_change_the_answer_is_refused(deployment, name):
    messages = [*MESSAGES, {"role": "assistant", "content": "I", name: True}]
    error = deployment.chat(messages=messages).json()["error"]
    assert (error["param"], name in error["message"]) == ("messages[1]", True)


def test_unknown_members_of_parts_and_calls_are_listed(qwen):
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "function": {"name": "f", "arguments": "{}", "mood": 1}, "index": 0}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    response = qwen.chat(messages=messages, max_tokens=1)
    assert response.status_code == 200, response.text
    assert set(response.headers["x-toka-ignored-params"].split(",")) == {
        "messages.content.cache_control",
        "messages.tool_calls.index",
        "messages.tool_calls.function.mood",
    }


# -- the side that a prompt is cut on


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_on_the_side_asked_for(deployment, tokenizer, side):
    text = "One two three four five six"
    prompts = {COMPLETIONS: tokenizer.encode(text), CHAT: tokenizer.encode_chat([{"role": "user", "content": text}])}
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 3}
    for path, prompt in prompts.items():
        asked = body | {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
        answer = deployment.post(path, asked).json()
        kept = prompt[:4] if side == "right" else prompt[-4:]
        assert (answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]) == kept
        assert answer["choices"][0]["token_ids"] == continuation(FakeShape(), kept, 8, seed=3)


def test_there_are_two_sides(deployment):
    error = deployment.complete(prompt="x", truncate_prompt_tokens=4, truncation_side="top").json()["error"]
    assert error["param"] == "truncation_side"


# -- usage in every chunk


@pytest.mark.parametrize(("body", "path"), BOTH)
@pytest.mark.parametrize("n", [1, 2])
def test_every_chunk_has_the_usage_so_far(deployment, body, path, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body | {"max_tokens": 6, "n": n, "return_token_ids": True, "stream_options": options}
    *chunks, last = events(deployment, path, **body)
    told = dict.fromkeys(range(n), 0)
    for chunk in chunks:
        [choice] = chunk["choices"]
        told[choice["index"]] += len(choice.get("token_ids", ()))
        usage, prompt = chunk["usage"], last["usage"]["prompt_tokens"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, told[choice["index"]])
        assert usage["total_tokens"] == prompt + told[choice["index"]]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6 * n)


def test_the_usage_so_far_counts_the_stop_token(deployment):
    body = {"prompt": "x", "max_tokens": 6, "seed": 1, "return_token_ids": True}
    stop = deployment.complete(**body).json()["choices"][0]["token_ids"][3]
    body |= {"stop_token_ids": [stop], "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = events(deployment, COMPLETIONS, **body)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == last["usage"]["completion_tokens"]


def test_usage_in_every_chunk_is_usage(deployment):
    alone = {"continuous_usage_stats": True}
    assert events(deployment, COMPLETIONS, prompt="x", max_tokens=2, stream_options=alone)[-1]["usage"]
    body = {"prompt": "x", "stream": True, "stream_options": alone | {"include_usage": False}}
    error = deployment.post(COMPLETIONS, body).json()["error"]
    assert (error["param"], "include_usage" in error["message"]) == ("stream_options", True)


# -- what is wrong, in sentences


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": "3"}, "n", "expected a whole number (got '3')"),
        ({"n": 0}, "n", "expected 1 or more (got 0)"),
        ({"temperature": 101}, "temperature", "expected 100 or less (got 101)"),
        ({"top_p": 0}, "top_p", "expected more than 0 (got 0)"),
        ({"stream": "yes"}, "stream", "expected true or false (got 'yes')"),
        ({"logit_bias": [1]}, "logit_bias", "expected an object (got [1])"),
        ({"stop_token_ids": 5}, "stop_token_ids", "expected a list (got 5)"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "expected an object or a string (got 5)"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "expected at least 1 item (got [])"),
        ({"truncation_side": "top"}, "truncation_side", "expected 'left' or 'right' (got 'top')"),
        ({"cache_salt": "x" * 300}, "cache_salt", "expected at most 256 characters (got str of length 300)"),
    ],
)
def test_what_is_wrong_is_a_sentence_with_what_is_allowed_and_what_was_given(deployment, body, param, message):
    for start, path in BOTH:
        error = deployment.post(path, start | body).json()["error"]
        assert (error["param"], error["message"]) == (param, f"invalid value for {param!r}: {message}")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected a string or a list (got 5)"),
        ({"messages": ["x"]}, "messages[0]", "expected an object (got 'x')"),
        ({"tool_choice": 5}, "tool_choice", "expected 'none', 'auto' or 'required' or an object (got 5)"),
        ({"documents": ["x"]}, "documents[0]", "expected an object (got 'x')"),
    ],
)
def test_so_is_what_is_wrong_with_a_conversation(deployment, body, param, message):
    error = deployment.chat(**body).json()["error"]
    assert (error["param"], error["message"]) == (param, f"invalid value for {param!r}: {message}")


def test_a_body_keeps_its_names_when_it_is_validated():
    """A Batch line is validated again when it is sent again."""
    document = {"prompt": "x", "max_new_tokens": 3, "best_of": 1}
    bodies = [validate(document, CompletionBody) for _ in range(2)]
    assert [(body.max_tokens, body.name_given("max_tokens")) for body in bodies] == [(3, "max_new_tokens")] * 2
