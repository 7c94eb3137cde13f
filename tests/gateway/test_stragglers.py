"""Stragglers of a group end or are parked over HTTP."""

import json

import pytest

from tests.gateway.deployment import Deployment, eventually
from tests.gateway.rollout.conftest import streamed

BODY = {"prompt": "Hi", "n": 6, "max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A deployment that runs two samples at a time, those of a prompt in the order of their indexes."""
    deployment = Deployment(tmp_path_factory.mktemp("narrow"), worker={"max_slots": 2})
    yield deployment.wait_ready()
    deployment.stop()


def reasons(choices: list[dict]) -> list[str]:
    return [each["finish_reason"] for each in sorted(choices, key=lambda each: each["index"])]


ENDED = ["length"] * 2 + ["abort"] * 4


def test_the_rest_of_a_group_ends_when_enough_samples_have_finished(narrow):
    whole = narrow.complete(**BODY).json()["choices"]
    answer = narrow.complete(**BODY, end_stragglers_after=2).json()
    assert reasons(answer["choices"]) == ENDED
    for each, complete in zip(answer["choices"], whole, strict=True):
        assert complete["text"].startswith(each["text"])
    assert answer["usage"]["completion_tokens"] >= 40


def test_each_prompt_has_its_own_group(narrow):
    choices = narrow.complete(**BODY | {"prompt": ["Hi", "Ho"]}, end_stragglers_after=2).json()["choices"]
    for group in (choices[:6], choices[6:]):
        ended = reasons(group)
        assert set(ended) == {"length", "abort"}
        assert ended.count("length") in (2, 3)  # two that finish in the same step both count


def test_a_stream_of_a_chat_ends_the_rest_too(narrow):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | BODY
    del body["prompt"]
    events = streamed(narrow, "/v1/chat/completions", body | {"end_stragglers_after": 2})
    ended = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert {choice["index"]: choice["finish_reason"] for choice in ended} == dict(enumerate(ENDED))


def test_parked_samples_have_the_answers_that_they_would_have_had(narrow):
    whole = narrow.complete(**BODY).json()["choices"]
    assert narrow.complete(**BODY, park_stragglers_after=1).json()["choices"] == whole
    eventually(lambda: narrow.metric("toka_num_requests_parked") == 0)


def test_a_single_sample_is_a_group(narrow):
    answer = narrow.complete(**BODY | {"n": 1}, end_stragglers_after=1).json()
    assert reasons(answer["choices"]) == ["length"]


def test_a_batch_job_ends_the_rest_of_the_groups_of_its_lines(narrow):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = BODY | {"model": "tokasaurus-builtin", "end_stragglers_after": 2}
    sdk = narrow.sdk()
    file = sdk.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        batch = sdk.batches.retrieve(batch.id)
    [result] = sdk.files.content(batch.output_file_id).text.splitlines()
    assert reasons(json.loads(result)["response"]["body"]["choices"]) == ENDED


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"end_stragglers_after": 0}, "end_stragglers_after", "expected 1 or more"),
        ({"end_stragglers_after": 7}, "end_stragglers_after", "at most n=6"),
        ({"park_stragglers_after": 7}, "park_stragglers_after", "at most n=6"),
        ({"park_stragglers_after": 3, "end_stragglers_after": 3}, "park_stragglers_after", "less than"),
        ({"end_stragglers_after": 2, "n": 1, "best_of": 3}, "end_stragglers_after", "not with best_of"),
        ({"end_stragglers_after": "x"}, "end_stragglers_after", "whole number"),
    ],
)
def test_a_wrong_number_names_the_field(narrow, given, field, message):
    refused = narrow.complete(**BODY | given)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, field), refused.text
    assert message in error["message"]


@pytest.mark.parametrize("name", ["end_stragglers_after", "park_stragglers_after"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "model": "x"}),
    ],
)
def test_apis_with_one_answer_refuse_it(narrow, path, body, name):
    refused = narrow.post(path, body | {name: 1})
    assert refused.status_code == 400
    assert name in refused.json()["error"]["message"]
