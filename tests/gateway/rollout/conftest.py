"""A gateway with two schedulers, whose steps are slow."""

import json
from collections.abc import Callable

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S, eventually
from tests.gateway.replicas import Replicas


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    replicas = Replicas(tmp_path_factory.mktemp("trained"), 2, worker={"step_ms": 20})
    try:
        replicas.deployment.wait_ready()
        eventually(lambda: replicas.ready == 2)
        yield replicas.deployment
    finally:
        replicas.stop()


@pytest.fixture(autouse=True)
def resumed(request):
    """A test leaves nothing paused."""
    yield
    if "trained" in request.fixturenames:
        post(request.getfixturevalue("trained"), "/resume")


def post(deployment, path: str, **given) -> httpx.Response:
    answer = httpx.post(deployment.url + path, timeout=PATIENCE_S, **given)
    assert answer.status_code == 200, answer.text
    return answer


def get(deployment, path: str):
    return httpx.get(deployment.url + path, timeout=PATIENCE_S).json()


def running(deployment) -> float:
    return deployment.metric("toka_num_requests_running")


def streamed(deployment, path: str, body: dict, then: Callable[[str], object] | None = None) -> list[dict]:
    """Return the events of a stream. Call ``then`` with the request's id after the first event with content."""
    events = []
    with httpx.stream("POST", deployment.url + path, json=body | {"stream": True}, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if then is not None and ("choices" in events[-1] or "delta" in events[-1]):
                then(answer.headers["x-request-id"])
                then = None
    return events


def texts(events: list[dict]) -> list[str]:
    """Return the texts of the choices of a stream, by index."""
    parts = [(choice["index"], choice["text"]) for event in events for choice in event["choices"]]
    return ["".join(text for at, text in parts if at == index) for index in range(1 + max(parts)[0])]


def reasons(events: list[dict]) -> list[str]:
    """Return the finish reasons of the choices of a stream, in the order of their ends."""
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
