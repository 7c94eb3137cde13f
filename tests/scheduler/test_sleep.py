"""Sleep and Wake: what happens to requests, to weights, and to workers that are lost meanwhile."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from services.common.errors import FailedPrecondition
from services.common.memory_parts import ALL_PARTS, MemoryPart
from services.scheduler.core.scheduler import Scheduler
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeReplica
from tests.scheduler.service import PROMPT, Service, session, start, with_scheduler
from tests.scheduler.test_weights import commit, stage, update
from tokasaurus.common.v1 import memory_pb2 as m
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import sleep_pb2 as s

SHAPE = FakeShape(max_slots=2)
WEIGHTS, CACHE = m.MEMORY_PART_WEIGHTS, m.MEMORY_PART_KV_CACHE


def fields(max_tokens: int) -> dict:
    stopping = g.Stopping(max_tokens=max_tokens, ignore_eos=True)
    return {"tokens": g.TokenPrompt(token_ids=PROMPT), "stopping": stopping, "sampling": g.Sampling(seed=3)}


async def sleep(service: Service, mode: str = "KEEP", **more) -> s.SleepResponse:
    return await service.stub.Sleep(s.SleepRequest(mode=c.PauseMode.Value(f"PAUSE_MODE_{mode}"), **more))


async def wake(service: Service, *parts: int) -> list[int]:
    return list((await service.stub.Wake(s.WakeRequest(parts=parts))).asleep)


async def falling_asleep(service: Service, mode: str = "KEEP") -> s.SleepResponse:
    """Put workers to sleep that are held. They are released when the scheduler plans no more."""
    return await service.pausing(sleep(service, mode))


def asleep(service: Service) -> list[set]:
    return [set(worker.asleep) for worker in service.workers]


async def refusal(call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return refused.value.details()


async def test_kept_samples_continue_as_if_there_had_been_no_sleep():
    async with start(SHAPE) as service, session(service) as client:
        alone = (await service.generate(**fields(60)))[0].tokens
        await service.begin(client, **fields(60))
        response = await falling_asleep(service)
        assert (response.aborted_samples, response.released_bytes) == (0, 2000)
        load = await service.load()
        assert (load.asleep, load.paused, load.ready) == (True, False, True)
        assert (load.running_sequences, load.cached_pages, load.in_use_pages) == (0, 0, 0)
        await client.submit(1, **fields(4))
        await client.decided(1)
        assert (await service.load()).counters.steps == load.counters.steps
        assert await wake(service) == []
        await client.finished(0, 1)
        assert client.samples[0].tokens == alone
        assert client.samples[1].tokens == alone[:4]
        assert not (await service.load()).asleep


async def test_aborted_samples_end_with_their_tokens_and_the_next_requests_wait():
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, n=5, **fields(2000))
        assert (await falling_asleep(service, "ABORT")).aborted_samples == 5
        await client.finished(*range(5))
        assert {client.samples[handle].finish.reason for handle in range(5)} == {g.FINISH_REASON_ABORTED}
        await client.submit(9, **fields(3))
        await client.decided(9)
        await wake(service)
        await client.finished(9)


async def test_a_sleep_that_waits_begins_after_all_accepted_requests():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, n=5, **fields(10))
        await client.decided(0)
        sleeping = asyncio.ensure_future(sleep(service, "WAIT"))
        await service.until_load(lambda load: load.paused)
        await client.submit(9, **fields(3))
        await client.decided(9)
        service.worker.release()
        await sleeping
        await client.finished(*range(5))
        assert 9 not in client.samples
        await wake(service)
        await client.finished(9)


@pytest.mark.parametrize("first", [WEIGHTS, CACHE])
async def test_generation_continues_when_the_last_part_is_awake(first):
    async with start(SHAPE) as service, session(service) as client:
        await sleep(service)
        await client.submit(0, **fields(4))
        await client.decided(0)
        assert await wake(service, first) == [CACHE if first == WEIGHTS else WEIGHTS]
        assert (await service.load()).asleep
        assert await wake(service, WEIGHTS, CACHE) == []
        await client.finished(0)


async def test_a_part_may_sleep_alone_and_the_others_later():
    async with start(SHAPE) as service:
        assert (await sleep(service, parts=[CACHE])).released_bytes == 1000
        assert asleep(service) == [{MemoryPart.KV_CACHE}]
        assert (await sleep(service)).released_bytes == 1000
        assert (await sleep(service)).released_bytes == 0
        assert asleep(service) == [ALL_PARTS]
        await wake(service)
        assert await wake(service) == []  # has no effect
        assert (await service.generate(**fields(4)))[0].finish.usage.cached_prompt_tokens == 0


@pytest.mark.parametrize("mode", ["KEEP", "ABORT", "WAIT"])
async def test_a_pause_of_the_caller_outlasts_the_sleep(mode):
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, **fields(60))
        await service.pausing(service.stub.Pause(c.PauseRequest()))
        assert (await sleep(service, mode)).aborted_samples == (mode == "ABORT")
        await wake(service)
        load = await service.load()
        assert (load.paused, load.asleep) == (True, False)
        await service.stub.Resume(c.ResumeRequest())
        await client.finished(0)


async def test_a_resume_during_a_sleep_ends_the_pause_and_not_the_sleep():
    async with start(SHAPE) as service, session(service) as client:
        await service.stub.Pause(c.PauseRequest())
        await sleep(service)
        await service.stub.Resume(c.ResumeRequest())
        await client.submit(0, **fields(4))
        await client.decided(0)
        load = await service.load()
        assert (load.paused, load.asleep, load.counters.steps) == (False, True, 0)
        await wake(service)
        await client.finished(0)


async def test_a_resume_ends_a_sleep_that_still_waits():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(10))
        await client.decided(0)
        sleeping = asyncio.ensure_future(sleep(service, "WAIT"))
        await service.until_load(lambda load: load.paused)
        await service.stub.Resume(c.ResumeRequest())
        assert "resumed" in await refusal(sleeping)
        service.worker.release()
        await client.finished(0)
        assert asleep(service) == [set()]


async def test_a_sleep_continues_when_its_caller_leaves():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(10))
        await client.decided(0)
        call = service.stub.Sleep(s.SleepRequest(mode=c.PAUSE_MODE_WAIT))
        await service.until_load(lambda load: load.paused)
        call.cancel()
        service.worker.release()
        await client.finished(0)
        await service.until_load(lambda load: load.asleep and not load.paused)
        await wake(service)


async def test_all_ranks_sleep_and_wake():
    replica = FakeReplica(SHAPE, tp_size=2, pp_size=2)
    async with start(replica=replica, pp_size=2) as service, session(service) as client:
        await service.begin(client, n=3, **fields(60))
        assert (await falling_asleep(service)).released_bytes == 8000
        assert asleep(service) == [ALL_PARTS] * 4
        await wake(service)
        await client.finished(0, 1, 2)


@pytest.mark.parametrize("call", ["Sleep", "Wake"])
async def test_after_a_call_that_fails_at_one_rank_it_can_be_repeated(call):
    replica = FakeReplica(SHAPE, tp_size=2)
    async with start(replica=replica) as service, session(service) as client:
        await client.submit(0, **fields(10))

        def fail() -> None:
            raise FailedPrecondition("the device has too little memory")

        if call == "Sleep":
            service.workers[1].on_sleep = fail
            assert service.workers[1].address in await refusal(sleep(service))
            assert asleep(service) == [set()] * 2
            assert not (await service.load()).asleep
            service.workers[1].on_sleep = lambda: None
        await sleep(service)
        assert asleep(service) == [ALL_PARTS] * 2
        if call == "Wake":
            service.workers[1].on_wake = fail
            assert "too little memory" in await refusal(wake(service))
            assert (await service.load()).asleep
            service.workers[1].on_wake = lambda: None
        await wake(service)
        await client.finished(0)


async def test_weights_are_replaced_when_they_are_awake():
    async with start(SHAPE) as service, session(service) as client:
        staged = await stage(service, 1, version="v1")
        await sleep(service, level=2)
        assert "weights are asleep" in await refusal(stage(service, 1, version="v1"))
        assert "weights are asleep" in await refusal(commit(service, staged))
        assert asleep(service) == [ALL_PARTS]
        await client.submit(0, **fields(10))
        await client.decided(0)
        await wake(service, WEIGHTS)
        await update(service, 2)
        assert (await service.load()).asleep
        await wake(service, CACHE)
        await client.finished(0)
        assert [span.version for span in client.samples[0].finish.weights] == ["v2"]


async def wake_when_connected(service) -> None:
    """Wake all parts as soon as the scheduler is connected to its workers."""
    while True:
        try:
            return await wake(service)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


@pytest.mark.parametrize("woken", [(), (WEIGHTS,)])
async def test_a_worker_that_restarts_during_a_sleep_is_asleep_again(woken):
    async with start(SHAPE) as service, session(service) as client:
        await update(service, 1)
        await sleep(service)
        if woken:
            await wake(service, *woken)
        before = asleep(service)
        await client.submit(0, **fields(10))
        await client.decided(0)
        slept = asyncio.Event()
        service.worker.on_sleep = slept.set
        service.worker.crash()
        await slept.wait()
        assert asleep(service) == before
        assert service.worker.weights.version == "v1"
        await wake_when_connected(service)
        await client.finished(0)


async def test_a_scheduler_that_restarts_takes_the_sleep_over():
    replica = FakeReplica(SHAPE, tp_size=2)
    addresses = [await worker.start() for worker in replica.workers]
    try:
        async with with_scheduler(addresses, replica.workers) as service:
            await sleep(service)
        replica.workers[1].asleep -= {MemoryPart.KV_CACHE}  # as after a call that was lost
        async with with_scheduler(addresses, replica.workers) as service, session(service) as client:
            assert (await service.load()).asleep
            assert asleep(service) == [ALL_PARTS] * 2
            await client.submit(0, **fields(10))
            await client.decided(0)
            await wake(service)
            await client.finished(0)
            assert [worker.violations for worker in replica.workers] == [[], []]
    finally:
        for worker in replica.workers:
            await worker.stop()


async def test_a_worker_is_woken_whose_scheduler_is_awake():
    async with start(SHAPE) as service:
        await service.generate(**fields(4))
        worker = service.worker
        restarted, worker.end_of = asyncio.Event(), worker.crash
        worker.on_wake = restarted.set
        worker.crash()
        worker.asleep = ALL_PARTS
        await restarted.wait()
        assert len((await service.generate(**fields(4)))[0].tokens) == 4


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (s.SleepRequest(level=0), "level"),
        (s.SleepRequest(level=3), "level"),
        (s.SleepRequest(parts=[7]), "MEMORY_PART_WEIGHTS"),
        (s.WakeRequest(parts=[0]), "MEMORY_PART_KV_CACHE"),
        (s.SleepRequest(mode=9), "PAUSE_MODE|KEEP"),
    ],
)
async def test_a_wrong_call_names_the_field(service, request_, field):
    method = service.stub.Sleep if isinstance(request_, s.SleepRequest) else service.stub.Wake
    with pytest.raises(grpc.aio.AioRpcError, match=field) as refused:
        await method(request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert asleep(service) == [set()]


async def test_a_worker_that_cannot_sleep_goes_on():
    async with start(replace(SHAPE, sleeps=False)) as service:
        assert "cannot sleep" in await refusal(sleep(service))
        assert "cannot sleep" in await refusal(wake(service))
        assert len((await service.generate(**fields(4)))[0].tokens) == 4


def test_a_core_without_a_worker_falls_asleep():
    core = Scheduler([b"x"], 1)
    core.sleep()
    assert core.is_paused
    core.wake()
    assert not core.is_paused
