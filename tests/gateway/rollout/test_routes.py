"""Pauses, aborts and cache resets over HTTP, at two schedulers."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from services.common.errors import FailedPrecondition, Unavailable
from services.gateway.rollout import control
from tests.gateway.console.test_observer import connected
from tests.gateway.deployment import PATIENCE_S, eventually, eventually_all
from tests.gateway.rollout.conftest import get, post, reasons, running, streamed, texts

LONG = {"prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "seed": 5}


def is_paused(deployment) -> bool:
    return get(deployment, "/is_paused")["is_paused"]


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        (("/pause?mode=keep", {}), "/resume"),
        pytest.param(("/pause?mode=keep&clear_cache=false", {}), "/resume", marks=pytest.mark.slow),
        pytest.param(
            ("/pause_generation", {"json": {"mode": "in_place"}}), "/continue_generation", marks=pytest.mark.slow
        ),
        (("/pause_generation", {"json": {"mode": "retract"}}), "/continue_generation"),
    ],
)
def test_kept_requests_continue_as_if_there_had_been_no_pause(trained, pause, resume):
    body = LONG | {"max_tokens": 100, "n": 4}
    alone = texts(streamed(trained, "/v1/completions", body))

    def pause_and_resume(_) -> None:
        path, given = pause
        post(trained, path, **given)
        assert is_paused(trained)
        eventually(lambda: trained.metric("toka_paused") == 2)
        later = pool.submit(trained.complete, prompt="Hi", max_tokens=2)
        post(trained, resume, json={})
        assert later.result(PATIENCE_S).status_code == 200

    with ThreadPoolExecutor(1) as pool:
        assert texts(streamed(trained, "/v1/completions", body, pause_and_resume)) == alone
    assert not is_paused(trained)


def test_a_pause_that_waits_answers_after_the_last_request(trained):
    def pause(_) -> None:
        assert post(trained, "/pause?mode=wait").json() == {"status": "paused", "aborted_samples": 0}

    events = streamed(trained, "/v1/completions", LONG | {"max_tokens": 40, "n": 2}, pause)
    assert reasons(events) == ["length"] * 2
    assert is_paused(trained)


STOPS = {
    "vllm pause": lambda deployment, _: post(deployment, "/pause"),
    "sglang pause": lambda deployment, _: post(deployment, "/pause_generation"),
    "vllm one": lambda deployment, name: post(deployment, "/abort_requests", json={"request_ids": [name, "gone"]}),
    "vllm all": lambda deployment, _: post(deployment, "/abort_requests"),
    "sglang one": lambda deployment, name: post(deployment, "/abort_request", json={"rid": name}),
    "sglang all": lambda deployment, _: post(deployment, "/abort_request", json={"abort_all": True}),
}


@pytest.mark.parametrize("stop", STOPS)
def test_aborted_samples_end_with_their_tokens(trained, stop):
    body = LONG | {"n": 3, "stream_options": {"include_usage": True}}
    events = streamed(trained, "/v1/completions", body, lambda name: STOPS[stop](trained, name))
    assert reasons(events) == ["abort"] * 3
    assert 1 <= events[-1]["usage"]["completion_tokens"] < 3 * 1500
    eventually(lambda: running(trained) == 0)
    assert is_paused(trained) == ("pause" in stop)


def test_every_prompt_of_an_aborted_request_ends_and_others_continue(trained):
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(trained.complete, **LONG | {"max_tokens": 60})
        body = LONG | {"prompt": ["Hi", "Ho", "Hu"], "extra": 1}
        events = streamed(
            trained, "/v1/completions", body, lambda name: post(trained, "/abort_request", json={"rid": name})
        )
        assert reasons(events) == ["abort"] * 3
        assert other.result(PATIENCE_S).json()["choices"][0]["finish_reason"] == "length"


def test_one_prompt_of_a_request_is_aborted_by_its_number(trained):
    aborted = []

    def stop(name: str) -> None:
        aborted.append(post(trained, "/abort_requests", json={"request_ids": [f"{name}-1"]}).json()["samples"])
        aborted.append(post(trained, "/abort_requests", json={"request_ids": [name]}).json()["samples"])

    body = LONG | {"prompt": ["Hi", "Ho", "Hu"], "n": 4}
    events = streamed(trained, "/v1/completions", body, stop)
    reasons = [each["finish_reason"] for event in events for each in event["choices"] if each["finish_reason"]]
    assert reasons == ["abort"] * 12
    assert aborted == [4, 8]


@pytest.mark.parametrize(
    "body",
    [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1, "max_tokens": 0}],
    ids=["prompt_logprobs", "echo", "no answer"],
)
def test_a_prompt_that_is_aborted_before_it_is_scored_has_no_scores(trained, body):
    post(trained, "/pause?mode=keep")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(trained.complete, **{"prompt": ["Hi, Ho", "Hu, Hu"], "max_tokens": 2} | body)
        eventually_all(2, lambda: post(trained, "/abort_requests").json()["samples"])
        choices = answer.result(PATIENCE_S).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 2
    assert [choice["text"] for choice in choices] == (["Hi, Ho", "Hu, Hu"] if "echo" in body else [""] * 2)
    assert not any(choice.get("prompt_logprobs") for choice in choices)


def test_aborts_in_the_words_of_each_api(trained):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500, "ignore_eos": True, "model": "x"}

    def stop(name: str) -> None:
        post(trained, "/abort_requests", json={})

    events = streamed(trained, "/v1/chat/completions", chat, stop)
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    events = streamed(trained, "/v1/messages", chat, stop)
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["pause_turn"]
    events = streamed(trained, "/v1/responses", {"input": "Hi", "max_output_tokens": 1500, "ignore_eos": True}, stop)
    [ended] = [event["response"] for event in events if event["type"] == "response.incomplete"]
    assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "abort"})


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "/pause?mode=keep"])
def test_prompts_after_a_reset_are_computed_again(trained, path):
    def cached() -> int:
        usage = trained.complete(prompt="word " * 200, max_tokens=1).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    post(trained, path)
    post(trained, "/resume")
    assert cached() == 0


def test_the_cache_is_flushed_by_get_as_in_sglang(trained):
    assert httpx.get(trained.url + "/flush_cache", timeout=PATIENCE_S).status_code == 200
    page = {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}
    assert httpx.get(trained.url + "/flush_cache", headers=page, timeout=PATIENCE_S).status_code == 403


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        ("/pause?mode=stop", {}, "mode"),
        ("/pause?clear_cache=perhaps", {}, "clear_cache"),
        ("/pause_generation", {"json": {"mode": "keep"}}, "mode"),
        ("/abort_request", {"json": {}}, "rid"),
        ("/abort_request", {}, "rid"),
        ("/abort_requests", {"json": {"request_ids": "x"}}, "request_ids"),
        ("/abort_requests", {"json": {"request_ids": [""]}}, "request_ids"),
        ("/abort_requests", {"json": {"request_ids": ["x"] * 5000}}, "request_ids"),
    ],
)
def test_a_wrong_call_names_the_field(trained, path, given, field):
    refused = httpx.post(trained.url + path, timeout=PATIENCE_S, **given)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
    assert not is_paused(trained)


def test_unknown_parameters_are_listed(trained):
    answer = post(trained, "/abort_request", json={"rid": "x", "what": 1})
    assert answer.headers["x-toka-ignored-params"] == "what"


@pytest.mark.parametrize(
    ("stub", "error"), [("none", Unavailable), ("old", FailedPrecondition), ("closed", Unavailable)]
)
async def test_a_scheduler_that_cannot_be_called_is_named(stub, error):
    """It is not connected, it is older than the call, or its connection ends."""
    async with connected() as (_, channel, replica):
        if stub == "none":
            replica.stub = None
        if stub == "closed":
            await channel.close()
        with pytest.raises(error, match=replica.address):
            await control.pause(SimpleNamespace(replicas=(replica,)), "keep")
