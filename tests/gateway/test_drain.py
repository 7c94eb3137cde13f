"""SIGTERM: what runs ends, and nobody else waits for it."""

import signal

import httpx
import openai
import pytest

from bench.server import free_port
from tests.gateway.deployment import Deployment, eventually, stop_and_wait


@pytest.fixture(params=[60], ids=lambda seconds: f"drain{seconds}")
def leaving(tmp_path, request):
    """With slow steps, so that it is stopped in the middle of an answer."""
    running = Deployment(tmp_path, worker={"step_ms": 5}, gateway={"drain_seconds": request.param}).wait_ready()
    yield running
    running.stop()


def begin(sdk: openai.OpenAI, max_tokens: int) -> openai.Stream:
    """A stream, behind its first chunk."""
    stream = sdk.completions.create(
        model=sdk.models.list().data[0].id,
        prompt="x",
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert next(stream).choices[0].finish_reason is None
    return stream


def refuses(url: str) -> bool:
    try:
        httpx.get(url + "/health")
    except (httpx.ConnectError, httpx.ReadError):  # reset where the listener closed with it in its queue
        return True
    return False


def test_running_requests_end_and_new_connections_are_refused(leaving):
    with leaving.sdk() as sdk, httpx.Client(base_url=leaving.url) as idle:
        assert idle.get("/ready").status_code == 200
        stream = begin(sdk, 300)
        leaving.gateway.signal(signal.SIGTERM)
        eventually(lambda: refuses(leaving.url))
        with pytest.raises(httpx.TransportError):  # its connection, which was kept, is closed
            idle.get("/ready")
        assert leaving.gateway.running
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert leaving.gateway.wait() == 0


@pytest.mark.slow
def test_operators_are_answered_until_the_drain_is_over(tmp_path):
    port = free_port()
    flags = {"drain_seconds": 60, "admin_port": port}
    leaving = Deployment(tmp_path, worker={"step_ms": 5}, gateway=flags).wait_ready()
    try:
        with leaving.sdk() as sdk, httpx.Client(base_url=f"http://127.0.0.1:{port}") as operator:
            stream = begin(sdk, 300)
            assert operator.get("/ready").status_code == 200
            leaving.gateway.signal(signal.SIGTERM)
            eventually(lambda: refuses(leaving.url))
            for get in (operator.get, httpx.get):  # on its connection, and on a new one
                ready = get(f"http://127.0.0.1:{port}/ready")
                assert (ready.status_code, ready.json()["reason"]) == (503, "the gateway is shutting down")
            assert "toka_" in operator.get("/metrics").text
            assert list(stream)[-1].choices[0].finish_reason == "length"
            assert leaving.gateway.wait() == 0  # it does not wait for the operator to leave
    finally:
        leaving.stop()


@pytest.mark.slow
def test_the_second_signal_tells_running_requests_that_it_is_over(leaving):
    with leaving.sdk() as sdk:
        stream = begin(sdk, 2040)
        leaving.gateway.signal(signal.SIGTERM)
        eventually(lambda: refuses(leaving.url))
        leaving.gateway.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert leaving.gateway.wait() in (0, 128 + signal.SIGTERM)  # by itself, or by force where it took long


@pytest.mark.parametrize("leaving", [0.2], indirect=True)
def test_what_takes_too_long_ends_with_a_reason(leaving):
    with leaving.sdk() as sdk:
        stream = begin(sdk, 2040)
        leaving.gateway.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert leaving.gateway.wait() == 0


@pytest.mark.slow
def test_a_scheduler_that_leaves_for_long_and_a_worker_that_leaves_end_well_and_are_said_to_be_gone(leaving):
    with leaving.sdk() as sdk:
        stream = begin(sdk, 300)
        leaving.scheduler.signal(signal.SIGTERM)
        eventually(lambda: leaving.status("/ready") == 503)
        [replica] = httpx.get(leaving.url + "/ready").json()["replicas"]
        assert (replica["ready"], replica["reason"]) == (False, "draining")
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert leaving.scheduler.wait() == 0
    assert stop_and_wait(leaving.worker) == 0
