"""A gateway with two schedulers, whose steps are slow."""

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S, eventually
from tests.gateway.replicas import Replicas


@pytest.fixture(scope="module")
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
