"""``/generate`` and the endpoints that describe the server, as slime's and verl's clients call them."""

import json
from itertools import pairwise

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S, eventually, eventually_async
from tests.gateway.replicas import Replicas
from tests.gateway.rollout.conftest import get, post

IDS = [40, 41, 42]
# The bodies of slime's rollout and of verl's adapter.
SLIME = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 7,
}  # fmt: skip
VERL = {
    "n": 1, "max_new_tokens": 12, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": False, "stop_token_ids": [2], "sampling_seed": 7,
    "skip_special_tokens": True, "spaces_between_special_tokens": True,
}  # fmt: skip


def generate(deployment, **body) -> dict | list:
    return post(deployment, "/generate", json=body).json()


def chunks(deployment, **body) -> list[dict]:
    """Return the events of a stream, which must end with the mark."""
    answer = post(deployment, "/generate", json=body | {"stream": True})
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def requests(deployment) -> int:
    """Return the number of unfinished requests, as slime does."""
    return sum(each["num_total_reqs"] for each in get(deployment, "/v1/loads?include=core")["loads"])


def refusal(deployment, **body) -> tuple[int, str]:
    answer = httpx.post(f"{deployment.url}/generate", json=body, timeout=PATIENCE_S)
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize("params", [SLIME, VERL])
def test_tokens_and_log_probabilities_are_those_of_a_completion(deployment, params):
    answer = generate(deployment, input_ids=IDS, sampling_params=params, return_logprob=True)
    completion = deployment.complete(
        prompt=IDS, max_tokens=12, temperature=1.0, top_p=1, top_k=-1, seed=7, return_token_ids=True, logprobs=0,
        logprobs_mode="processed",
    ).json()["choices"][0]  # fmt: skip
    meta = answer["meta_info"]
    assert answer["output_ids"] == completion["token_ids"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == completion["token_ids"]
    assert [value for value, _, _ in meta["output_token_logprobs"]] == completion["logprobs"]["token_logprobs"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["output_token_logprobs_length"]) == (3, 12, 12)


@pytest.mark.parametrize(("asked", "tokens"), [({}, 128), ({"max_new_tokens": None}, 148)])
def test_without_a_number_the_length_is_that_of_sglang(deployment, asked, tokens):
    answer = generate(deployment, input_ids=[40] * 1900, sampling_params=asked | {"ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == tokens


def test_every_event_of_a_stream_has_the_answer_so_far(deployment):
    body = {"input_ids": IDS, "sampling_params": SLIME, "return_logprob": True}
    events, whole = chunks(deployment, **body), generate(deployment, **body)
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        scored = before["meta_info"]["output_token_logprobs"]
        assert len(scored) == before["meta_info"]["output_token_logprobs_length"]
    own = ("id", "cached_tokens", "queue_time", "e2e_latency")
    for each in (whole, events[-1]):
        assert all(each["meta_info"].pop(name) is not None for name in own)
    assert events[-1] == whole


@pytest.mark.parametrize("skip_special_tokens", [True, False])  # slime's default is False
@pytest.mark.parametrize("kind", ["string", "token"])
def test_the_text_ends_before_the_stop_and_the_tokens_include_it(deployment, kind, skip_special_tokens):
    params = {"max_new_tokens": 40, "sampling_seed": 3, "skip_special_tokens": skip_special_tokens}
    free = generate(deployment, input_ids=IDS, sampling_params=params)
    if kind == "token":
        stop = free["output_ids"][20]
        params |= {"stop_token_ids": [stop]}
    else:
        stop = free["text"][20:22]
        params |= {"stop": [stop]}
    trimmed = generate(deployment, input_ids=IDS, sampling_params=params, return_logprob=True)
    kept = generate(deployment, input_ids=IDS, sampling_params=params | {"no_stop_trim": True})
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert free["text"].startswith(kept["text"]) or kind == "token"
    assert kept["text"].startswith(trimmed["text"])
    assert len(trimmed["text"]) < len(kept["text"])
    assert kept["output_ids"] == trimmed["output_ids"] == free["output_ids"][: len(kept["output_ids"])]
    assert len(trimmed["meta_info"]["output_token_logprobs"]) == len(trimmed["output_ids"])
    if kind == "token":
        assert trimmed["output_ids"][-1] == stop
    else:
        assert trimmed["text"] + stop == kept["text"]
    last = chunks(deployment, input_ids=IDS, sampling_params=params)[-1]
    assert (last["text"], last["output_ids"]) == (trimmed["text"], trimmed["output_ids"])


def test_several_prompts_and_samples_give_a_list(deployment):
    params = {"max_new_tokens": 4, "sampling_seed": 1}
    first = generate(deployment, input_ids=IDS, sampling_params=params)
    several = generate(deployment, input_ids=[IDS, [50]], sampling_params=params, rid=["a", "b"])
    assert [each["meta_info"]["id"] for each in several] == ["a", "b"]
    assert [each["index"] for each in several] == [0, 1]
    assert several[0]["output_ids"] == first["output_ids"]
    samples = generate(deployment, text="Hi", sampling_params=params | {"n": 3}, rid="mine")
    assert [each["meta_info"]["id"] for each in samples] == ["mine"] * 3
    assert len({tuple(each["output_ids"]) for each in samples}) == 3
    assert {event["index"] for event in chunks(deployment, text=["Hi", "Ho"], sampling_params=params)} == {0, 1}


def test_a_teacher_gets_log_probabilities_of_a_prompt(deployment):
    """slime's on-policy distillation sends this body."""
    params = {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = generate(deployment, **body, logprob_start_len=0)["meta_info"]
    scores = deployment.complete(prompt=IDS, max_tokens=0, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    own = [None, *(entry[str(token)]["logprob"] for token, entry in zip(IDS[1:], scores[1:], strict=True))]
    assert meta["input_token_logprobs"] == [[value, token, None] for value, token in zip(own, IDS, strict=True)]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    later = generate(deployment, **body, logprob_start_len=2)["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][2:]


def test_alternatives_and_texts_of_tokens(deployment):
    params = {"max_new_tokens": 3, "temperature": 0}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True}
    meta = generate(deployment, **body, top_logprobs_num=2, return_text_in_logprobs=True)["meta_info"]
    assert [len(tops) for tops in meta["output_top_logprobs"]] == [2] * 3
    assert [tops[0] for tops in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert all(isinstance(text, str) for _, _, text in meta["output_token_logprobs"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input_ids"),
        ({"text": "Hi", "input_ids": IDS}, "input_ids"),
        ({"input_ids": ["Hi"]}, "input_ids"),
        ({"text": [1]}, "text"),
        ({"input_ids": [9_999_999]}, "input_ids"),
        ({"text": "Hi", "temperature": 1.0}, "temperature"),
        ({"text": "Hi", "prompt": "Hi"}, "prompt"),
        ({"text": "Hi", "image_data": ["x"]}, "image_data"),
        ({"text": "Hi", "lora_path": "x"}, "lora_path"),
        ({"text": "Hi", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "Hi", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"text": "Hi", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "Hi", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
        (
            {"text": "Hi", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "Hi", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"text": "Hi", "return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
        ({"text": "Hi", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"text": "Hi", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "Hi", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "Hi", "return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"text": "Hi", "sampling_params": {"max_tokens": 2}}, "sampling_params.max_tokens"),
        ({"text": "Hi", "sampling_params": {"seed": 2}}, "sampling_params.seed"),
        ({"text": "Hi", "rid": ["a", "b"]}, "rid"),
        ({"text": "Hi", "return_routed_experts": True}, "return_routed_experts"),
    ],
)
def test_a_refusal_names_the_parameter(deployment, body, field):
    assert refusal(deployment, **body) == (400, field)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, ["'sampling_params.ebnf'", "sampling_params.regex"]),
        ({"routed_experts_start_len": 1}, ["'routed_experts_start_len'"]),
        ({"sampling_params": {"n": 99_999}}, ["sampling_params.n=99999"]),
    ],
)
def test_the_message_of_a_refusal_has_the_names_of_this_endpoint(deployment, body, names):
    answer = httpx.post(f"{deployment.url}/generate", json={"text": "Hi"} | body, timeout=PATIENCE_S)
    message = answer.json()["error"]["message"]
    assert all(name in message for name in names)
    assert not any(name in message for name in ("guided_", "prompt_start"))


def test_unknown_parameters_are_listed(deployment):
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 1, "stream_interval": 2}, "log_metrics": False}
    ignored = post(deployment, "/generate", json=body).headers["x-toka-ignored-params"]
    assert ignored == "log_metrics,sampling_params.stream_interval"


def test_a_request_is_aborted_by_its_id(trained):
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "rid": "slow-1"}
    with httpx.stream("POST", f"{trained.url}/generate", json=body | {"stream": True}, timeout=PATIENCE_S) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        first = json.loads(next(lines))
        assert first["meta_info"]["id"] == "slow-1"
        assert requests(trained) == 1
        assert post(trained, "/abort_request", json={"rid": "slow-1"}).json() == {"samples": 1}
        *_, last, done = lines
    assert done == "[DONE]"
    assert json.loads(last)["meta_info"]["finish_reason"]["type"] == "abort"
    eventually(lambda: requests(trained) == 0)


def test_an_answer_names_the_weights(trained):
    post(trained, "/update_weights_from_disk", json={"model_path": "/weights/1", "weight_version": "s1"})
    meta = generate(trained, input_ids=IDS, sampling_params={"max_new_tokens": 3, "ignore_eos": True})["meta_info"]
    assert meta["weight_version"] == "s1"
    assert meta["weights"] == [{"version": "s1", "tokens": 3}]
    assert get(trained, "/model_info")["weight_version"] == "s1"


def test_the_server_describes_itself(trained):
    info = get(trained, "/server_info")
    assert info == get(trained, "/get_server_info")
    assert (info["dp_size"], info["num_gpus"], info["vllm_config"]) == (2, 2, {"weight_transfer_config": None})
    model = get(trained, "/get_model_info")
    assert model["is_generation"]
    assert model.items() <= info.items()
    assert httpx.get(f"{trained.url}/health_generate", timeout=PATIENCE_S).status_code == 200


async def test_the_version_is_that_of_the_schedulers_that_are_connected(tmp_path):
    async with Replicas.running(tmp_path, 2, worker={}) as replicas:
        post(
            replicas.deployment, "/update_weights_from_disk", json={"model_path": "/weights/1", "weight_version": "s1"}
        )
        replicas.schedulers[0].kill()
        await eventually_async(lambda: replicas.ready == 1)
        assert get(replicas.deployment, "/model_info")["weight_version"] == "s1"
