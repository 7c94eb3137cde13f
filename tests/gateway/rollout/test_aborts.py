"""Aborts of requests that wait in the gateway, because the only scheduler has no worker."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.deployment import PATIENCE_S, Deployment, eventually
from tests.gateway.rollout.conftest import post


@pytest.fixture
def workerless(tmp_path):
    running = Deployment(tmp_path).wait_ready()
    running.worker.kill()
    eventually(lambda: running.status("/ready") == 503)
    yield running
    running.stop()


def test_queued_requests_end_without_tokens_and_others_run_later(workerless):
    def generate(rid: str, stream: bool) -> list[dict]:
        body = {"text": ["Hi", "Ho"], "sampling_params": {"max_new_tokens": 20, "n": 2}, "rid": rid}
        answer = post(workerless, "/generate", json=body | {"stream": stream})
        if not stream:
            return answer.json()
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]

    def abort(rid: str) -> int:
        return post(workerless, "/abort_request", json={"rid": rid}).json()["samples"]

    def ends(samples: list[dict]) -> list[tuple[str, int]]:
        return [(each["meta_info"]["finish_reason"]["type"], len(each["output_ids"])) for each in samples]

    with ThreadPoolExecutor(3) as pool:
        whole, streamed = pool.submit(generate, "r1", False), pool.submit(generate, "r2", True)
        other = pool.submit(generate, "r", False)
        eventually(lambda: abort("r1") == 4)
        eventually(lambda: abort("r2") == 4)
        assert ends(whole.result(PATIENCE_S)) == [("abort", 0)] * 4
        assert ends(streamed.result(PATIENCE_S)) == [("abort", 0)] * 4
        workerless.worker.start()
        assert ends(other.result(PATIENCE_S)) == [("length", 20)] * 4
