"""A caller's trace context reaches the scheduler's log, beside the request's id."""

import json

import httpx
import pytest

from tests.gateway.deployment import Deployment, eventually

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def deployment(tmp_path):
    running = Deployment(tmp_path, scheduler={"log_level": "DEBUG"}).wait_ready()
    yield running
    running.stop()


@pytest.mark.parametrize(("header", "logged"), [(TRACE, TRACE), ("not a trace", "")])
def test_the_trace_context_is_in_the_schedulers_log(deployment, header, logged):
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    answer = httpx.post(deployment.url + "/v1/completions", json=body, headers={"traceparent": header}, timeout=60)
    identifier = answer.raise_for_status().json()["id"]

    def accepted() -> list[dict]:
        lines = (deployment.directory / "scheduler.log").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event.get("request_id") == identifier]

    eventually(lambda: bool(accepted()))
    assert [event["traceparent"] for event in accepted()] == [logged]
