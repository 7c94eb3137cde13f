"""Processes are killed during an update of two replicas: afterwards both have the same weights."""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S, eventually
from tests.gateway.replicas import Replicas
from tests.gateway.rollout.test_repair import update_until

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(tmp_path):
    replicas = Replicas(tmp_path, 2, worker={})
    try:
        replicas.deployment.wait_ready()
        eventually(lambda: replicas.ready == 2)
        yield replicas
    finally:
        replicas.stop()


def update(pair: Replicas, number: int) -> int:
    """Return the status of an update, or 0 if the gateway is lost."""
    body = {"model_path": f"/weights/{number}", "weight_version": f"v{number}"}
    try:
        return httpx.post(pair.deployment.url + "/update_weights_from_disk", json=body, timeout=PATIENCE_S).status_code
    except httpx.TransportError:
        return 0


def versions(pair: Replicas) -> set[str]:
    """Return the versions of all schedulers, or none if one cannot answer."""
    try:
        answer = httpx.get(pair.deployment.url + "/weights", timeout=PATIENCE_S)
    except httpx.TransportError:
        return set()
    return {each["version"] for each in answer.json()["schedulers"]} if answer.status_code == 200 else set()


@pytest.mark.parametrize("lost", ["neither", "scheduler", "worker", "both"])
def test_the_gateway_completes_an_update_that_one_of_two_schedulers_committed(pair, lost):
    """``lost``: the processes of the replica that has not committed."""
    assert update(pair, 1) == 200
    asyncio.run(update_until(pair.addresses, 2, 1))
    for process in [
        *([pair.schedulers[1]] if lost in ("scheduler", "both") else []),
        *([pair.workers[1]] if lost in ("worker", "both") else []),
    ]:
        process.kill()
        process.start()
    eventually(lambda: versions(pair) == {"v2"})
    [choice] = pair.deployment.complete(prompt=[40, 41, 42], max_tokens=4, ignore_eos=True).json()["choices"]
    assert choice["weights"] == [{"version": "v2", "tokens": 4}]


def test_a_gateway_that_is_killed_while_one_worker_reads_changes_nothing(pair):
    assert update(pair, 1) == 200
    pair.workers[1].signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(update, pair, 2)
        eventually(lambda: "/weights/2" in pair.schedulers[0].log.read_text())
        pair.deployment.gateway.kill()
        assert updating.result(PATIENCE_S) == 0
    pair.workers[1].signal(signal.SIGCONT)
    pair.deployment.gateway.start()
    eventually(lambda: versions(pair) == {"v1"})
    eventually(lambda: update(pair, 3) == 200)  # when the lease of the lost gateway has ended
    assert versions(pair) == {"v3"}
