"""Sleep of a deployment on CPUs: the same answers afterwards, also with several ranks and after kills."""

import asyncio
import os
import signal

import httpx
import pytest

from bench.server import Server, serve
from tests.checkpoints import make_checkpoint
from tests.e2e.test_weights import TIMEOUT_S, answers, checksums, is_complete, update, workers
from tests.gateway.deployment import eventually

pytestmark = pytest.mark.slow

FLAGS = {"device": "cpu", "kv_cache_num_tokens": 16 * 400, "torch_num_threads": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    for seed in range(2):
        make_checkpoint(directory / str(seed), "qwen3", seed=seed)
    return directory


def post(server: Server, path: str) -> dict:
    answer = httpx.post(server.base_url + path, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def is_sleeping(server: Server) -> bool:
    return httpx.get(f"{server.base_url}/is_sleeping", timeout=TIMEOUT_S).json()["is_sleeping"]


@pytest.mark.parametrize("flags", [{}, {"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}], ids=["alone", "tp", "pp", "dp"])
def test_answers_after_a_sleep_are_those_before(checkpoints, flags):
    with serve(model=checkpoints / "0", weight_directories=checkpoints, **FLAGS | flags) as server:
        before, sums = asyncio.run(answers(server, 8)), checksums(server)
        assert post(server, "/sleep?level=1")["released_bytes"] > 0
        post(server, "/wake_up")
        assert (asyncio.run(answers(server, 8)), checksums(server)) == (before, sums)
        post(server, "/sleep?level=2")
        post(server, "/wake_up?tags=weights")
        assert update(server, checkpoints / "1", "v1").status_code == 200
        assert is_sleeping(server)
        post(server, "/wake_up?tags=kv_cache")
        after, sums = asyncio.run(answers(server, 8)), checksums(server)
        post(server, "/sleep?level=2")
        post(server, "/wake_up")
        assert (asyncio.run(answers(server, 8)), checksums(server)) == (after, sums)
        assert after != before


@pytest.mark.parametrize("flags", [{}, {"tp_size": 2}], ids=["alone", "tp"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_is_killed_during_a_sleep_is_asleep_afterwards(checkpoints, flags, level):
    with serve(model=checkpoints / "0", weight_directories=checkpoints, **FLAGS | flags) as server:
        assert update(server, checkpoints / "1", "v1").status_code == 200
        before, sums = asyncio.run(answers(server, 4)), checksums(server)
        post(server, f"/sleep?level={level}")
        killed = set(workers(server))
        os.kill(min(killed), signal.SIGKILL)
        eventually(lambda: not killed & set(workers(server)) and is_complete(server), TIMEOUT_S)
        assert is_sleeping(server)
        refused = httpx.get(f"{server.base_url}/weights?checksums=true", timeout=TIMEOUT_S)
        assert (refused.status_code, "asleep" in refused.text) == (409, True)
        post(server, "/wake_up")
        assert (asyncio.run(answers(server, 4)), checksums(server)) == (before, sums)
