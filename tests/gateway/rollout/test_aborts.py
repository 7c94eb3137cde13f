"""Aborts of requests that no scheduler has accepted: they wait in the gateway, or are on their way to a scheduler."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from services.common.errors import Cancelled, NotFound
from services.common.memory_parts import ALL_PARTS
from services.gateway.console.cancelling import cancel_request
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.rollout import control, sleep
from services.scheduler.api import session
from tests.gateway.deployment import PATIENCE_S, Deployment, eventually, eventually_all
from tests.gateway.rollout.conftest import post
from tests.gateway.rollout.schedulers import Schedulers

MODEL = "tokasaurus-builtin"


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
        eventually_all(4, lambda: abort("r1"))
        eventually_all(4, lambda: abort("r2"))
        assert ends(whole.result(PATIENCE_S)) == [("abort", 0)] * 4
        assert ends(streamed.result(PATIENCE_S)) == [("abort", 0)] * 4
        workerless.worker.start()
        assert ends(other.result(PATIENCE_S)) == [("length", 20)] * 4


async def generate(fleet: Fleet, name: str, model: str = MODEL) -> ActiveRequest:
    prompt, settings = np.array([1, 2, 3], np.uint32), Settings(n=2, ignore_eos=True)
    return await fleet.generate([PromptRequest(name, model, prompt, 50, 7, settings)], streaming=False)


async def reasons(active: ActiveRequest) -> list[str]:
    ended = []
    async with asyncio.timeout(PATIENCE_S):
        while samples := await active.wait_ended():
            ended += [sample.outcome.reason for sample in samples]
    active.close()
    return ended


async def abort(fleet: Fleet) -> int:
    return await control.abort(fleet, ["r"])


async def pause(fleet: Fleet) -> int:
    samples = await control.pause(fleet, "abort")
    await control.resume(fleet)
    return samples


async def fall_asleep(fleet: Fleet) -> int:
    samples, _ = await sleep.sleep(fleet, ALL_PARTS, 1, "abort")
    await sleep.wake(fleet, ALL_PARTS)
    return samples


async def update(fleet: Fleet) -> None:
    await control.update_weights(fleet, "/weights/1", None, "abort")


ENDS = pytest.mark.parametrize("end", [abort, pause, fall_asleep, update])


@ENDS
async def test_requests_that_wait_in_the_gateway_end(end):
    async with Schedulers.running(1) as schedulers:
        [fleet] = schedulers.fleets
        active = await generate(fleet, "r", "a model without a scheduler")
        assert await end(fleet) in (2, None)
        assert await reasons(active) == ["abort"] * 2


@ENDS
async def test_requests_on_their_way_to_a_scheduler_end(end, monkeypatch):
    read, reading = session.read_message, asyncio.Event()

    async def read_later(*given, **more):
        await reading.wait()
        return await read(*given, **more)

    async with Schedulers.running(1) as schedulers:
        [fleet] = schedulers.fleets
        [worker] = schedulers.workers
        worker.hold()  # so that no sample finishes before its abort is read
        monkeypatch.setattr(session, "read_message", read_later)
        active, other = await generate(fleet, "r"), await generate(fleet, "other")
        await end(fleet)
        reading.set()
        assert await reasons(active) == ["abort"] * 2
        worker.release()
        assert await reasons(other) == ["length" if end is abort else "abort"] * 2


async def test_operators_cancel_requests_that_wait_in_the_gateway():
    async with Schedulers.running(1) as schedulers:
        [fleet] = schedulers.fleets
        active, other = [await generate(fleet, name, "a model without a scheduler") for name in ("r", "r-1")]
        assert await cancel_request(fleet, "r") == 2
        with pytest.raises(Cancelled):
            await reasons(active)
        with pytest.raises(NotFound):
            await cancel_request(fleet, "r")
        assert await abort(fleet) == 2
        assert await reasons(other) == ["abort"] * 2
