"""The calls of prime-rl's orchestrator: ``/inference/v1/generate``, and weights from a directory."""

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S
from tests.gateway.rollout.conftest import get, post

IDS = [40, 41, 42]
# The body of the renderers package, which prime-rl uses.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "seed": 3, "n": 1, "stop_token_ids": [2]}
SAMPLING |= {"logprobs": 1, "skip_special_tokens": False}


def generate(deployment, **body) -> dict:
    return post(deployment, "/inference/v1/generate", json=body).json()


def test_tokens_and_log_probabilities_are_those_of_a_completion(deployment, model):
    answer = generate(deployment, model=model, token_ids=IDS, sampling_params=SAMPLING, cache_salt="1", priority=0)
    completion = deployment.complete(
        prompt=IDS, max_tokens=8, temperature=1.0, top_p=1, top_k=0, seed=3, logprobs=1, return_token_ids=True
    ).json()["choices"][0]
    [choice] = answer["choices"]
    assert choice["token_ids"] == completion["token_ids"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [each["logprob"] for each in content] == completion["logprobs"]["token_logprobs"]
    assert [len(each["top_logprobs"]) for each in content] == [1] * 8
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 8)
    assert answer["request_id"]


def test_a_stop_token_is_returned_with_its_log_probability(deployment):
    free = generate(deployment, token_ids=IDS, sampling_params=SAMPLING)["choices"][0]["token_ids"]
    params = SAMPLING | {"stop_token_ids": [free[4]], "stop": ["\0"]}
    [choice] = generate(deployment, token_ids=IDS, sampling_params=params)["choices"]
    assert choice["token_ids"] == free[: free.index(free[4]) + 1]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert choice["finish_reason"] == "stop"


def test_without_a_limit_the_answer_fills_the_context(deployment):
    prompt = [40] * 2040
    [choice] = generate(deployment, token_ids=prompt, sampling_params={"ignore_eos": True})["choices"]
    assert (len(choice["token_ids"]), choice["logprobs"]) == (8, None)


def test_another_name_of_a_parameter_replaces_its_default(deployment):
    [choice] = generate(deployment, token_ids=IDS, sampling_params={"max_new_tokens": 2, "ignore_eos": True})["choices"]
    assert len(choice["token_ids"]) == 2


def test_a_prompt_is_scored(deployment):
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    scores = generate(deployment, token_ids=IDS, sampling_params=params)["prompt_logprobs"]
    assert scores[0] is None
    assert [next(iter(entry)) for entry in scores[1:]] == ["41", "42"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [9_999_999]}, "token_ids"),
        ({"token_ids": "Hi"}, "token_ids"),
        ({"token_ids": IDS, "temperature": 1.0}, "temperature"),
        ({"token_ids": IDS, "stream": True}, "stream"),
        ({"token_ids": IDS, "features": {"a": 1}}, "features"),
        ({"token_ids": IDS, "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"token_ids": IDS, "sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
        ({"token_ids": IDS, "sampling_params": {"allowed_token_ids": [1]}}, "sampling_params.allowed_token_ids"),
    ],
)
def test_a_refusal_names_the_parameter(deployment, body, field):
    answer = httpx.post(f"{deployment.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_unknown_sampling_parameters_are_listed(deployment):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 1, "skip_clone": True}, "request_id": "x"}
    ignored = post(deployment, "/inference/v1/generate", json=body).headers["x-toka-ignored-params"]
    assert ignored == "sampling_params.skip_clone,request_id"


def test_weights_come_from_a_directory_while_generation_is_paused(trained):
    post(trained, "/pause", params={"mode": "keep", "clear_cache": "false"})
    told = post(trained, "/update_weights", json={"weight_dir": "/weights/7"}).json()
    assert (told["status"], told["weight_version"]) == ("ok", "/weights/7")
    assert get(trained, "/is_paused") == {"is_paused": True}
    post(trained, "/resume")
    [choice] = generate(trained, token_ids=IDS, sampling_params={"max_tokens": 2, "ignore_eos": True})["choices"]
    assert choice["weights"] == [{"version": "/weights/7", "tokens": 2}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "update_info"),
        ({"weight_dir": None}, "update_info"),
        ({"weight_dir": "/none"}, "weight_dir"),
        ({"weight_dir": "/weights/1", "update_info": {"names": [], "dtype_names": [], "shapes": []}}, "update_info"),
    ],
)
def test_wrong_updates_name_the_parameter(trained, body, field):
    answer = httpx.post(f"{trained.url}/update_weights", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
