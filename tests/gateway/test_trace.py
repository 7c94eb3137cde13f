"""A caller's trace context reaches the scheduler's log, beside the request's id."""

import json

import httpx
import pytest

from tests.gateway.deployment import Deployment, eventually

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    running = Deployment(tmp_path_factory.mktemp("told"), scheduler={"log_level": "DEBUG"}).wait_ready()
    yield running
    running.stop()


@pytest.mark.slow
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


def test_the_id_of_a_stored_response_is_its_clients_only(deployment):
    """Whoever knows it may ask for the response, and a scheduler tells anybody what it schedules."""
    answer = deployment.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2})
    identifier, known = answer.raise_for_status().json()["id"], answer.headers["x-request-id"]
    eventually(lambda: known in deployment.logs())
    assert identifier.removeprefix("resp_") not in deployment.logs()
    assert deployment.status(f"/v1/responses/{identifier}") == 200
    assert deployment.status(f"/v1/responses/{known}") == 404
