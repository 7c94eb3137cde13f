"""What one request may ask for, and how long it may take."""

import json
import signal
import socket
import time
from urllib.parse import urlsplit

import openai
import pytest

from tests.gateway.deployment import Deployment, eventually

LIMITS = {"max_prompt_tokens": 100, "max_output_tokens": 50}
STUCK = {"slow_client_seconds": 1}
LONG = {"prompt": [20] * 10, "max_tokens": 1900}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Steps of 5 ms, four at once, and a queue of four."""
    flags = {"worker": {"step_ms": 5, "max_slots": 4}, "scheduler": {"max_queued_sequences": 4}, "gateway": STUCK}
    running = Deployment(tmp_path_factory.mktemp("slow"), **flags).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    running = Deployment(tmp_path_factory.mktemp("limited"), gateway=LIMITS).wait_ready()
    yield running
    running.stop()


def at_rest(deployment) -> bool:
    return deployment.metric("toka_num_requests_running") == 0 == deployment.metric("toka_num_requests_waiting")


def test_a_request_that_takes_longer_than_its_timeout_ends_with_504_and_is_not_to_be_retried(slow):
    answer = slow.complete(**LONG, timeout=0.3)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    eventually(lambda: at_rest(slow))


def test_the_sdk_does_not_retry_it(slow):
    with slow.sdk() as client:
        begun = slow.metric("toka_requests_accepted_total")
        with pytest.raises(openai.InternalServerError):
            client.with_options(max_retries=2).completions.create(
                model="tokasaurus-builtin", **LONG, extra_body={"timeout": 0.3}
            )
        assert slow.metric("toka_requests_accepted_total") == begun + 1


def test_a_stream_ends_with_the_error_behind_what_there_is(slow):
    answer = slow.complete(**LONG, timeout=0.5, stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert json.loads(events[0])["choices"]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"


def test_a_response_fails_in_its_own_form(slow):
    answer = slow.post("/v1/responses", {"input": "x", "timeout": 0.3, "max_output_tokens": 1900})
    assert answer.status_code == 504


def test_what_waits_in_the_queue_is_ended_too(slow):
    with slow.sdk() as client:
        stream = client.completions.create(
            model="tokasaurus-builtin", prompt=[20] * 8, n=4, max_tokens=1900, stream=True
        )
        next(iter(stream))
        with pytest.raises(openai.APIStatusError) as ended:  # of the same key: another one would be given a slot
            client.completions.create(model="tokasaurus-builtin", prompt="x", max_tokens=1, extra_body={"timeout": 0.2})
        assert ended.value.status_code == 504
        stream.close()
    eventually(lambda: at_rest(slow))


def test_a_request_in_time_is_answered(slow):
    assert slow.chat(max_tokens=2, timeout=60).status_code == 200


@pytest.mark.parametrize("timeout", [0, -1, 1e9, "1", True])
def test_a_wrong_timeout_is_refused_by_name(slow, timeout):
    answer = slow.complete(prompt="x", timeout=timeout)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.slow
def test_the_gateway_keeps_deadlines_where_no_scheduler_does(tmp_path):
    """The scheduler stands still with the request."""
    running = Deployment(tmp_path, worker={"step_ms": 20}).wait_ready()
    try:
        with running.sdk() as client:
            began = time.monotonic()
            stream = client.completions.create(
                model="tokasaurus-builtin", **LONG, stream=True, extra_body={"timeout": 3.0}
            )
            next(iter(stream))
            running.scheduler.signal(signal.SIGSTOP)
            with pytest.raises(openai.APIError, match="timeout passed"):
                list(stream)
            assert time.monotonic() - began >= 3.0
        running.scheduler.signal(signal.SIGCONT)
    finally:
        running.scheduler.signal(signal.SIGCONT)
        running.stop()


JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.slow
def test_what_runs_for_a_client_that_stopped_reading_is_cancelled(slow):
    """Log-probabilities fill its buffers."""
    cancelled = slow.metric("toka_sequences_cancelled_total")
    parts = urlsplit(slow.url)
    body = json.dumps({"prompt": [20] * 10, "max_tokens": 1900, "n": 4, "stream": True, "logprobs": 20}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((parts.hostname, parts.port))
        client.sendall(JSON_HEAD % len(body) + body)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: slow.metric("toka_sequences_cancelled_total") == cancelled + 4)
    eventually(lambda: at_rest(slow))


def test_a_full_queue_says_when_to_come_back(slow):
    with slow.sdk() as client:
        stream = client.completions.create(
            model="tokasaurus-builtin", prompt=[20] * 8, n=4, max_tokens=1900, stream=True
        )
        next(iter(stream))
        waiting = client.completions.create(model="tokasaurus-builtin", prompt="x", n=3, stream=True)
        answer = slow.complete(prompt="x", n=3)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        stream.close()
        waiting.close()
    eventually(lambda: at_rest(slow))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 51}, "max_tokens"),
        ("/v1/completions", {"prompt": [5] * 101}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [5] * 101]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 51}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 51},
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x y z " * 100}]}, "messages"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 51}, "max_output_tokens"),
        ("/v1/responses", {"input": "x y z " * 100}, "input"),
    ],
)
def test_more_than_the_operator_allows_is_refused_by_name(limited, path, body, field):
    answer = limited.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_what_is_left_out_is_what_is_allowed(limited):
    assert limited.chat(ignore_eos=True).json()["usage"]["completion_tokens"] == 50
    assert limited.complete(prompt="x", ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    assert limited.complete(prompt=[5] * 100, max_tokens=50).status_code == 200
    assert limited.complete(prompt=[5] * 500, truncate_prompt_tokens=100).status_code == 200
