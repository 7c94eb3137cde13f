"""``logprobs_mode`` of a request, and of the server, at every endpoint that has log-probabilities."""

import base64
import json

import numpy as np
import pytest

from tests.fakes.model import MOST_DRAWABLE, PROCESSED_LESS, chosen_logprob
from tests.gateway.deployment import Deployment
from tests.gateway.test_errors import error_of

PROMPT = [30, 31, 32]


@pytest.fixture(scope="module")
def processing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processing")
    running = Deployment(directory, scheduler={"logprobs_mode": "processed_logprobs"}).wait_ready()
    yield running
    running.stop()


def completed(server, **body) -> tuple[list[int], list[float], list[dict]]:
    """Tokens, their log-probabilities, and the most likely ones of a completion."""
    body = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 5, "return_token_ids": True, "seed": 3} | body
    response = server.complete(**body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "less", "top"),
    [
        ("raw", 0, 5),
        ("raw_logprobs", 0, 5),
        ("processed", PROCESSED_LESS, MOST_DRAWABLE),
        ("processed_logprobs", PROCESSED_LESS, MOST_DRAWABLE),
        (None, None, None),
    ],
)
def test_a_request_names_its_mode_or_gets_the_servers(deployment, processing, mode, less, top):
    for server in (deployment, processing):
        if mode is None:
            less, top = (PROCESSED_LESS, MOST_DRAWABLE) if server is processing else (0, 5)
        tokens, logprobs, best = completed(server, logprobs_mode=mode)
        assert logprobs == pytest.approx((chosen_logprob(tokens) - less).tolist())
        assert all(top <= len(each) <= top + 1 for each in best)  # the chosen token is among them
        chat = {"logprobs": True, "top_logprobs": 5, "max_tokens": 3, "return_token_ids": True, "logprobs_mode": mode}
        [choice] = server.chat(**chat).json()["choices"]
        entries = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == pytest.approx(chosen_logprob(choice["token_ids"]) - less)
        assert [len(entry["top_logprobs"]) for entry in entries] == [top] * 3


def test_a_response_has_them_too(deployment):
    asked = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 5, "seed": 1}
    asked |= {"max_output_tokens": 3, "temperature": 0}
    told = [
        deployment.post("/v1/responses", asked | mode).json()["output"][-1]["content"][0]["logprobs"]
        for mode in ({}, {"logprobs_mode": "processed"})
    ]
    for raw, processed in zip(*told, strict=True):
        assert processed["logprob"] == pytest.approx(raw["logprob"] - PROCESSED_LESS)
        assert (len(raw["top_logprobs"]), len(processed["top_logprobs"])) == (5, MOST_DRAWABLE)


def test_packed_ones_are_filled_up(deployment):
    """A rectangle of as many as were asked for."""
    body = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 5, "logprobs_mode": "processed"}
    told = json.loads(deployment.complete(**body, logprobs_in_fingerprint=True).json()["system_fingerprint"])
    ids = np.frombuffer(base64.b64decode(told["packed_topk_indices"][0]), np.int32).reshape(4, 5)
    values = np.frombuffer(base64.b64decode(told["packed_topk_logprobs"][0]), np.float32).reshape(4, 5)
    assert (ids[:, :MOST_DRAWABLE] >= 0).all()
    assert (ids[:, MOST_DRAWABLE:] == -1).all()
    assert (values[:, MOST_DRAWABLE:] == -np.inf).all()


def test_those_of_a_prompt_stay_the_models_own(deployment):
    body = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 0, "echo": True, "logprobs_mode": "processed"}
    logprobs = deployment.complete(**body).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[1:3] == pytest.approx(chosen_logprob(PROMPT[1:]))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "both", 1, True])
def test_another_mode_is_refused_with_the_names_of_ours(deployment, mode):
    error = error_of(deployment.complete(prompt="x", logprobs=1, logprobs_mode=mode), 400)
    assert error["param"] == "logprobs_mode"
    assert "'raw' or 'processed'" in error["message"]
