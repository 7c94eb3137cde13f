"""Log-probabilities of prompts: ``echo`` with ``logprobs``, and ``prompt_logprobs``."""

from types import SimpleNamespace

import numpy as np
import pytest

from services.gateway.engine.codec import PromptScores, TokenLogprob
from services.gateway.openai.logprobs import echoed, rank
from services.gateway.openai.transcript import Piece
from tests.fakes.model import FakeShape, chosen_logprob, top_token_ids
from tests.gateway.deployment import Deployment
from tests.gateway.test_errors import error_of
from tests.gateway.test_streaming import events
from tests.gateway.tokens import token_bytes

TEXT = "Tom has 3 apples — naïve 🙂"
LONG = [20 + number % 1500 for number in range(1700)]


def merged(chunks: list[dict]) -> dict:
    """``logprobs`` of choice 0 from its chunks."""
    logprobs: dict[str, list] = {}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return logprobs


@pytest.mark.parametrize("top", [0, 3])
def test_an_echo_has_the_logprobs_of_its_prompt(deployment, tokenizer, top):
    body = {"prompt": TEXT, "max_tokens": 5, "seed": 1, "logprobs": top}
    alone = deployment.complete(**body).json()["choices"][0]
    choice = deployment.complete(**body, echo=True).json()["choices"][0]
    assert choice["text"] == TEXT + alone["text"]
    prompt, logprobs = tokenizer.encode(TEXT), choice["logprobs"]
    count = len(prompt)
    assert {len(values) for values in logprobs.values()} == {count + 5}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:count] == pytest.approx(chosen_logprob(prompt[1:]))
    assert all(top <= len(values) <= top + 1 for values in logprobs["top_logprobs"][1:])
    assert all(map(dict.__contains__, logprobs["top_logprobs"][1:], logprobs["tokens"][1:]))
    assert b"".join(map(token_bytes, logprobs["tokens"])).decode(errors="replace").startswith(TEXT)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token) or token.startswith("bytes:")
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert logprobs[name][count:] == alone["logprobs"][name]
    assert [offset - len(TEXT) for offset in logprobs["text_offset"][count:]] == alone["logprobs"]["text_offset"]
    chunks = events(deployment, "/v1/completions", **body, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert merged(chunks) == logprobs


def test_many_samples_behind_a_long_prompt_each_end_once(deployment):
    """Writing the prompt takes long enough for samples to end meanwhile."""
    body = {"prompt": LONG, "n": 6, "max_tokens": 4, "logprobs": 1, "echo": True}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in events(deployment, "/v1/completions", **body)]
    assert reasons.count("length") == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_that_is_cached_is_computed_whole(deployment, stream):
    body = {"prompt": LONG, "max_tokens": 0, "logprobs": 1, "echo": True}
    assert deployment.complete(prompt=LONG, max_tokens=1).status_code == 200
    if stream:
        logprobs = merged(events(deployment, "/v1/completions", **body))
    else:
        answer = deployment.complete(**body).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["usage"]["completion_tokens"] == 0
        logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(LONG)
    assert logprobs["token_logprobs"][1:] == pytest.approx(chosen_logprob(LONG[1:]))


def test_every_prompt_and_sample_has_its_own(deployment):
    prompts = [[30, 31, 32], [40, 41], [50]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "logprobs": 0, "echo": True}
    choices = deployment.complete(**body).json()["choices"]
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        told = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(prompt) + 3
        assert told[0] is None
        assert told[1 : len(prompt)] == pytest.approx(chosen_logprob(prompt[1:]))
        assert None not in told[1:]


def test_the_best_with_their_prompt(deployment):
    body = {"prompt": [30, 31], "best_of": 4, "max_tokens": 3, "logprobs": 0, "echo": True}
    [choice] = deployment.complete(**body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 5


def test_an_aborted_sample_is_no_better_than_a_whole_one():
    def sample(reason: str, *values: float) -> SimpleNamespace:
        entries = [TokenLogprob(value, [], []) for value in values]
        return SimpleNamespace(outcome=SimpleNamespace(reason=reason), logprobs=entries, new_logprobs=entries)

    samples = [sample("abort"), sample("abort", -0.1), sample("stop", -3.0), sample("length", -2.0, -1.0)]
    assert sorted(samples, key=rank, reverse=True) == [samples[3], samples[2], samples[0], samples[1]]


def expected_prompt_logprobs(tokenizer, prompt, top) -> list:
    """As the fake worker has them, in vLLM's shape."""

    def entry(token, rank):
        text = tokenizer.decode([token], skip_special_tokens=False)
        return {"logprob": pytest.approx(float(chosen_logprob([token])[0])), "rank": rank, "decoded_token": text}

    told: list = [None]
    for token in prompt[1:]:
        likeliest = top_token_ids(token, top, FakeShape().vocab_size).tolist()
        others = {str(other): entry(other, place) for place, other in enumerate(likeliest, 1)}
        told.append(others | {str(token): entry(token, token % 7 + 1)})
    return told


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_by_name(deployment, tokenizer, top):
    prompts = [tokenizer.encode("Tom has 3 apples"), [60, 61]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "prompt_logprobs": top}
    choices = deployment.complete(**body).json()["choices"]
    for index, choice in enumerate(choices):
        assert choice["prompt_logprobs"] == expected_prompt_logprobs(tokenizer, prompts[index // 2], top)
        assert choice["logprobs"] is None
    chat = deployment.chat(max_tokens=2, prompt_logprobs=top).json()
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat["prompt_logprobs"] == expected_prompt_logprobs(tokenizer, prompt, top)
    assert "prompt_logprobs" not in deployment.chat(max_tokens=2).json()


@pytest.mark.parametrize("start", [0, 1, 5])
def test_prompt_logprobs_from_a_position(deployment, tokenizer, start):
    """The entries from there on, and nothing before it."""
    prompt = tokenizer.encode("Tom has 3 apples and 5 pears")
    body = {"prompt": prompt, "max_tokens": 2, "n": 2, "prompt_logprobs": 2, "prompt_logprobs_start": start}
    for choice in deployment.complete(**body).json()["choices"]:
        assert choice["prompt_logprobs"] == expected_prompt_logprobs(tokenizer, prompt, 2)[start:]
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    chat = deployment.chat(max_tokens=2, prompt_logprobs=1, prompt_logprobs_start=1).json()
    assert chat["prompt_logprobs"] == expected_prompt_logprobs(tokenizer, prompt, 1)[1:]


@pytest.mark.parametrize(("start", "cached"), [(1, 0), (1600, 1584), (1601, 1600), (1699, 1696)])
def test_a_cached_prefix_before_the_position_is_not_computed_again(deployment, start, cached):
    body = {"prompt": LONG, "max_tokens": 1, "prompt_logprobs": 0}
    whole = deployment.complete(**body).json()
    answer = deployment.complete(**body, prompt_logprobs_start=start).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert answer["choices"][0]["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"][start:]


def test_an_echo_and_a_name_may_ask_for_different_numbers(deployment):
    body = {"prompt": [60, 61, 62], "max_tokens": 1, "seed": 1, "prompt_logprobs": 4, "logprobs": 1, "echo": True}
    choice = deployment.complete(**body).json()["choices"][0]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [4, 4]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    del body["logprobs"]
    assert deployment.complete(**body).json()["choices"][0]["logprobs"] is None
    last = deployment.complete(**body, prompt_logprobs_start=2).json()["choices"][0]
    assert (last["text"], last["prompt_logprobs"]) == (choice["text"], choice["prompt_logprobs"][2:])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs_start": 1}, "prompt_logprobs_start"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": -1}, "prompt_logprobs_start"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": 100}, "prompt_logprobs_start"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": 1, "echo": True, "logprobs": 1}, "prompt_logprobs_start"),
        ({"logprob_start_len": 1}, "logprob_start_len"),
    ],
)
def test_what_is_wrong_is_named(deployment, body, param):
    assert error_of(deployment.complete(prompt="x", **body), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "echo")]
)
def test_more_than_a_gateway_can_write_are_refused(deployment, body, param):
    error = error_of(deployment.complete(prompt=LONG, n=400, max_tokens=1, **body), 400)
    assert error["param"] == param
    assert "21 log-probabilities for each of 1700 prompt tokens of 400 samples are more than" in error["message"]


@pytest.mark.slow
def test_a_worker_that_has_none_is_told_of(tmp_path):
    without = Deployment(tmp_path, worker={"prompt_logprobs": 0}).wait_ready()
    try:
        for body, param in (({"prompt_logprobs": 1}, "prompt_logprobs"), ({"echo": True, "logprobs": 1}, "echo")):
            error = error_of(without.complete(prompt="x", **body), 400)
            assert error["param"] == param
            assert "computes no log-probabilities of prompts" in error["message"]
        assert without.complete(prompt="x", echo=True).status_code == 200
    finally:
        without.stop()


def test_a_text_without_the_space_its_tokens_begin_with(tokenizer):
    prompt = np.array(tokenizer.encode(" two words", add_special_tokens=False), np.uint32)
    count = len(prompt)
    nothing = np.zeros((count - 1, 0))
    scores = PromptScores(1, np.zeros(count - 1, np.float32), np.ones(count - 1, np.uint32), nothing, nothing)
    piece = echoed(prompt, [scores], 0, "two words", tokenizer.vocabulary, Piece("!", []))
    assert piece.text == "two words!"
    for entry in piece.entries[1:]:
        assert "two words"[entry.text_offset :].startswith(tokenizer.vocabulary.token_bytes[entry.token_id].decode())
