"""Log-probabilities in ``system_fingerprint``, read as clients of the original Tokasaurus read them."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.model import FakeShape, chosen_logprob, continuation, top_token_ids
from tests.gateway.test_errors import error_of
from tests.gateway.test_parameters import CHAT

API = Path(__file__).parents[2] / "docs" / "api.md"


def decoded(packed: str, dtype) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed), dtype)


def test_packed_logprobs_are_those_of_a_completion(deployment):
    body = {"prompt": ["x", "y"], "n": 2, "seed": 4, "max_tokens": 7, "logprobs": 3, "return_token_ids": True}
    plain = deployment.complete(**body).json()["choices"]
    answer = deployment.complete(**body, logprobs_in_fingerprint=True).json()
    told = json.loads(answer["system_fingerprint"])
    assert told["completion_ids"] == [choice["token_ids"] for choice in plain]
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in plain]
    for index, choice in enumerate(plain):
        assert answer["choices"][index]["logprobs"] is None
        chosen = decoded(told["packed_chosen_logprobs"][index], np.float32)
        assert chosen.tolist() == pytest.approx(choice["logprobs"]["token_logprobs"])
        top = decoded(told["packed_topk_logprobs"][index], np.float32).reshape(7, 3)
        ids = decoded(told["packed_topk_indices"][index], np.int32).reshape(7, 3)
        assert top == pytest.approx(chosen_logprob(ids.ravel()).reshape(7, 3))
        assert ids.tolist() == [list(top_token_ids(token, 3, 2048)) for token in choice["token_ids"]]


def test_packed_logprobs_of_a_chat_equal_the_others(deployment):
    body = {"seed": 4, "max_tokens": 9, "n": 3, "logprobs": True, "top_logprobs": 2}
    plain = deployment.chat(**body).json()["choices"]
    answer = deployment.chat(**body, logprobs_in_fingerprint=True).json()
    told = json.loads(answer["system_fingerprint"])
    for index, choice in enumerate(plain):
        content = choice["logprobs"]["content"]
        assert answer["choices"][index]["logprobs"] is None
        assert answer["choices"][index]["message"] == choice["message"]
        chosen = decoded(told["packed_chosen_logprobs"][index], np.float32)
        assert chosen.tolist() == pytest.approx([token["logprob"] for token in content])
        top = decoded(told["packed_topk_logprobs"][index], np.float32).reshape(-1, 2)
        expected = [[other["logprob"] for other in token["top_logprobs"]] for token in content]
        assert top == pytest.approx(np.array(expected))


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"logprobs": False}])
def test_chosen_tokens_need_no_other_parameter(deployment, tokenizer, more):
    expected = continuation(FakeShape(), tokenizer.encode("x"), 5, seed=1)
    post, body = deployment.complete, {"prompt": "x"}
    if more.get("logprobs") is False:
        post, body = deployment.chat, {"messages": CHAT}
        expected = continuation(FakeShape(), tokenizer.encode_chat(CHAT), 5, seed=1)
    answer = post(**body, **more, seed=1, max_tokens=5, logprobs_in_fingerprint=True).json()
    told = json.loads(answer["system_fingerprint"])
    assert told["completion_ids"] == [expected]
    assert decoded(told["packed_chosen_logprobs"][0], np.float32) == pytest.approx(chosen_logprob(np.array(expected)))
    assert told["packed_topk_indices"] is told["packed_topk_logprobs"] is None


def test_a_stop_token_is_among_them(llama):
    answer = llama.chat(messages=[{"role": "user", "content": "Yes."}], logprobs_in_fingerprint=True).json()
    told = json.loads(answer["system_fingerprint"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(told["completion_ids"][0]) == answer["usage"]["completion_tokens"]
    assert len(decoded(told["packed_chosen_logprobs"][0], np.float32)) == answer["usage"]["completion_tokens"]


def test_the_best_of_many_are_told_with_theirs(deployment):
    body = {"prompt": "x", "seed": 5, "max_tokens": 6, "best_of": 8, "n": 2, "return_token_ids": True}
    answer = deployment.complete(**body, logprobs_in_fingerprint=True).json()
    told = json.loads(answer["system_fingerprint"])
    assert told["completion_ids"] == [choice["token_ids"] for choice in answer["choices"]]
    means = [decoded(packed, np.float32).mean() for packed in told["packed_chosen_logprobs"]]
    assert len(means) == 2
    assert means[0] >= means[1]


def test_without_it_a_fingerprint_is_one(deployment):
    for told in (None, False):
        answer = deployment.complete(prompt="x", max_tokens=1, logprobs_in_fingerprint=told).json()
        assert answer["system_fingerprint"].startswith("fp_")


@pytest.mark.parametrize("more", [{"stream": True}, {"echo": True}])
def test_what_it_does_not_go_with_is_named(deployment, more):
    response = deployment.complete(prompt="x", logprobs=1, logprobs_in_fingerprint=True, **more)
    error = error_of(response, 400)
    assert error["param"] == "logprobs_in_fingerprint"
    assert next(iter(more)) in error["message"]


def test_the_snippet_of_the_documents_works(sdk, model):
    [snippet] = re.findall(r"```python\n((?:(?!```).)*logprobs_in_fingerprint.*?)```", API.read_text(), re.DOTALL)
    space = {"client": sdk, "model": model}
    exec(snippet, space)
    assert space["chosen"].shape == (20,)
    assert space["top_ids"].shape == space["top_logprobs"].shape == (20, 5)
    assert len(space["ids"]) == 20
