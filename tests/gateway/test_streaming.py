"""Server-sent events, as they are on the wire and as the SDK reads them."""

import json

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S, Deployment
from tests.gateway.tokens import token_bytes

SPEECH = "naïve café 今日は 🙂🙃 done. "


@pytest.fixture(scope="module")
def speaker(tmp_path_factory, tokenizer):
    """A deployment whose every answer is ``SPEECH``, over and over."""
    ids = ",".join(map(str, tokenizer.encode(SPEECH, add_special_tokens=False)))
    running = Deployment(tmp_path_factory.mktemp("speaker"), worker={"reply_ids": ids}).wait_ready()
    yield running
    running.stop()


def events(deployment, path, **body) -> list[dict]:
    """The events of a stream, each checked to be one well-formed line, ``[DONE]`` removed from the end."""
    with httpx.stream("POST", deployment.url + path, json=body | {"stream": True}, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    assert raw.endswith("data: [DONE]\n\n")
    lines = raw.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: {") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_chunks_of_a_completion(deployment):
    chunks = events(deployment, "/v1/completions", prompt="x", max_tokens=6, seed=1)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    whole = deployment.complete(prompt="x", max_tokens=6, seed=1).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_chunks_of_a_chat_begin_with_the_role(deployment):
    chunks = events(deployment, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=6, n=2)
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_comes_last_and_once_when_asked_for(deployment):
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 5, "stream_options": {"include_usage": True}}
    chunks = events(deployment, "/v1/completions", **body)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20


def test_streamed_logprobs_are_those_of_the_whole_answer(deployment):
    body = {"prompt": "x", "max_tokens": 15, "seed": 4, "logprobs": 2}
    whole = deployment.complete(**body).json()["choices"][0]["logprobs"]
    streamed: dict[str, list] = {name: [] for name in whole}
    for chunk in events(deployment, "/v1/completions", **body):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == whole


def test_no_chunk_holds_half_a_character(speaker, tokenizer):
    tokens = len(tokenizer.encode(SPEECH, add_special_tokens=False))
    chunks = events(speaker, "/v1/completions", prompt="x", max_tokens=tokens)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == SPEECH
    assert "\ufffd" not in "".join(texts)
    assert len(texts) > 1  # how many come together depends on who is faster


def test_an_answer_cut_inside_a_character_says_so_at_the_end_only(speaker, tokenizer):
    ids = tokenizer.encode(SPEECH, add_special_tokens=False)
    cut = next(i for i in range(1, len(ids)) if "\ufffd" in tokenizer.decode(ids[:i]))
    chunks = events(speaker, "/v1/completions", prompt="x", max_tokens=cut)
    assert [i for i, chunk in enumerate(chunks) if "\ufffd" in chunk["choices"][0]["text"]] == [len(chunks) - 1]


@pytest.mark.parametrize(
    "stop", ["今日", "🙃", "é 今", ["nothing", "done. na"], "café 今日は 🙂🙃 done. naïve caf", "e."]
)
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stop_string_ends_the_text_before_it_streamed_or_not(speaker, stop, logprobs):
    body = {"prompt": "x", "max_tokens": 200, "stop": stop, "logprobs": logprobs}
    wanted = (SPEECH * 3).split(stop if isinstance(stop, str) else stop[1])[0]
    whole = speaker.complete(**body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (wanted, "stop")
    chunks = [chunk["choices"][0] for chunk in events(speaker, "/v1/completions", **body)]
    assert "".join(chunk["text"] for chunk in chunks) == wanted
    assert chunks[-1]["finish_reason"] == "stop"
    if logprobs is not None:
        streamed = [token for chunk in chunks for token in (chunk["logprobs"] or {"tokens": []})["tokens"]]
        assert streamed == whole["logprobs"]["tokens"]
        told = [token_bytes(token) for token in streamed]
        assert b"".join(told).startswith(wanted.encode())
        assert len(b"".join(told[:-1])) < len(wanted.encode())


def test_a_stop_string_that_never_comes_holds_nothing_back(speaker):
    body = {"prompt": "x", "max_tokens": 40, "stop": "done. never"}
    text = "".join(chunk["choices"][0]["text"] for chunk in events(speaker, "/v1/completions", **body))
    assert text == speaker.complete(prompt="x", max_tokens=40).json()["choices"][0]["text"]


def test_a_rejected_request_is_an_http_error_not_an_event(deployment):
    response = deployment.complete(prompt=[1] * 3000, stream=True)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_the_sync_sdk_streams(sdk, model):
    with sdk.completions.create(model=model, prompt="x", seed=1, max_tokens=9, n=3, stream=True) as stream:
        texts = ["", "", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    whole = sdk.completions.create(model=model, prompt="x", seed=1, max_tokens=9, n=3)
    assert texts == [choice.text for choice in whole.choices]


def test_five_hundred_choices_in_one_stream(deployment):
    chunks = events(deployment, "/v1/completions", prompt="x", n=500, max_tokens=3, seed=1)
    ended = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ended) == list(range(500))
