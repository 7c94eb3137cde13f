"""Pause, Resume, AbortRequests and ResetPrefixCache."""

import asyncio

import grpc
import pytest

from tests.fakes.model import FakeShape
from tests.scheduler.service import PROMPT, Service, session, start
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import generate_pb2 as g

SHAPE = FakeShape(max_slots=2)


def fields(max_tokens: int) -> dict:
    stopping = g.Stopping(max_tokens=max_tokens, ignore_eos=True)
    return {"tokens": g.TokenPrompt(token_ids=PROMPT), "stopping": stopping, "sampling": g.Sampling(seed=3)}


async def pause(service: Service, mode: str = "KEEP", **more) -> int:
    request = c.PauseRequest(mode=c.PauseMode.Value(f"PAUSE_MODE_{mode}"), **more)
    return (await service.stub.Pause(request)).aborted_samples


async def resume(service: Service) -> None:
    await service.stub.Resume(c.ResumeRequest())


@pytest.mark.parametrize("recompute", [False, True])
async def test_kept_samples_continue_as_if_there_had_been_no_pause(recompute):
    async with start(SHAPE) as service:
        alone = (await service.generate(**fields(60)))[0].tokens
        async with session(service) as client:
            await service.begin(client, **fields(60))
            assert await service.pausing(pause(service, recompute=recompute)) == 0
            load = await service.load()
            assert (load.paused, load.ready, load.plans_in_flight) == (True, True, 0)
            assert load.running_sequences == (0 if recompute else 1)
            await client.submit(1, **fields(4))  # accepted, and waits
            await client.decided(1)
            assert (await service.load()).counters.steps == load.counters.steps
            await resume(service)
            await client.finished(0, 1)
            assert not (await service.load()).paused
        assert client.samples[0].tokens == alone
        assert client.samples[1].tokens == alone[:4]


async def test_a_pause_that_waits_begins_after_all_accepted_requests():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, n=5, **fields(10))
        await client.decided(0)
        pausing = asyncio.ensure_future(pause(service, "WAIT"))
        await service.until_load(lambda load: load.paused)
        await client.submit(9, **fields(3))
        await client.decided(9)
        assert not pausing.done()
        service.worker.release()
        assert await pausing == 0
        await client.finished(0, 1, 2, 3, 4)
        assert {client.samples[handle].finish.reason for handle in range(5)} == {g.FINISH_REASON_LENGTH}
        assert 9 not in client.samples
        await resume(service)
        await client.finished(9)


async def test_aborted_samples_end_with_their_tokens_and_the_next_requests_wait():
    async with start(SHAPE) as service, session(service) as client:
        await service.begin(client, n=5, **fields(2000))
        assert await service.pausing(pause(service, "ABORT")) == 5
        await client.finished(0, 1, 2, 3, 4)
        for handle in range(5):
            sample = client.samples[handle]
            assert sample.finish.reason == g.FINISH_REASON_ABORTED
            assert sample.finish.usage.completion_tokens == len(sample.tokens)
            assert not sample.finish.HasField("error")
        assert client.samples[0].tokens
        assert (await service.load()).in_use_pages == 0
        await client.submit(9, **fields(3))
        await client.decided(9)
        await resume(service)
        await client.finished(9)


async def test_a_resume_ends_a_pause_that_still_waits():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(10))
        await client.decided(0)
        pausing = asyncio.ensure_future(pause(service, "WAIT"))
        await service.until_load(lambda load: load.paused)
        await resume(service)
        with pytest.raises(grpc.aio.AioRpcError, match=r"resumed before") as failed:
            await pausing
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        service.worker.release()
        await client.finished(0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_pause_with_a_limit_ends_by_itself(leaves):
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(10))
        await client.decided(0)
        call = service.stub.Pause(c.PauseRequest(limit_ns=1))
        await service.until_load(lambda load: load.paused)
        if leaves:
            call.cancel()
        service.release()
        await client.finished(0)
        assert not (await service.load()).paused


async def test_the_limit_of_a_pause_leaves_a_later_pause():
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **fields(10))
        await client.decided(0)
        limited = asyncio.ensure_future(service.stub.Pause(c.PauseRequest(limit_ns=1)))
        await service.until_load(lambda load: load.paused)
        later = asyncio.ensure_future(service.stub.Pause(c.PauseRequest()))
        service.release()
        await asyncio.gather(limited, later)
        for _ in range(20):
            assert (await service.load()).paused
        await resume(service)
        await client.finished(0)


async def test_a_pause_stays_when_its_caller_leaves(service):
    service.worker.hold()
    async with session(service) as client:
        await client.submit(0, **fields(10))
        await client.decided(0)
        call = service.stub.Pause(c.PauseRequest(mode=c.PAUSE_MODE_WAIT))
        await service.until_load(lambda load: load.paused)
        call.cancel()
        service.worker.release()
        await client.finished(0)
        assert (await service.load()).paused
        await resume(service)
        await resume(service)  # has no effect


@pytest.mark.parametrize(("ids", "ended"), [(["a"], {0, 1, 2}), (["a-1", "none"], {1}), ([], {0, 1, 2, 3, 4})])
async def test_aborted_requests_end_with_their_tokens_and_others_continue(ids, ended):
    async with start(SHAPE) as service, session(service) as client:
        service.worker.hold()
        for handle, name in enumerate(("a", "a-1", "a-0+1.0", "ab", "b")):
            await client.submit(handle, request_id=name, **fields(10))
        await client.decided(4)
        response = await service.stub.AbortRequests(c.AbortRequestsRequest(request_ids=ids))
        assert response.samples == len(ended)
        service.worker.release()
        await client.finished(*range(5))
        aborted = {h for h in range(5) if client.samples[h].finish.reason == g.FINISH_REASON_ABORTED}
        assert aborted == ended


@pytest.mark.parametrize("ids", [[""], ["x"] * 4097])
async def test_ids_that_cannot_be_meant_are_refused(service, ids):
    with pytest.raises(grpc.aio.AioRpcError, match=r"id") as refused:
        await service.stub.AbortRequests(c.AbortRequestsRequest(request_ids=ids))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_mode_names_the_known_ones(service):
    with pytest.raises(grpc.aio.AioRpcError, match=r"KEEP \(1\), WAIT \(2\), ABORT \(3\)"):
        await service.stub.Pause(c.PauseRequest(mode=9))


async def test_prompts_after_a_reset_of_the_cache_are_computed_again(service):
    async def cached() -> int:
        return (await service.generate(**fields(4)))[0].finish.usage.cached_prompt_tokens

    assert (await cached(), await cached()) == (0, 32)
    assert (await service.stub.ResetPrefixCache(c.ResetPrefixCacheRequest())).freed_pages > 0
    assert (await service.load()).cached_pages == 0
    assert await cached() == 0


async def test_a_resume_that_names_a_pause_leaves_a_later_one(service):
    first = await service.stub.Pause(c.PauseRequest())
    second = await service.stub.Pause(c.PauseRequest())
    await service.stub.Resume(c.ResumeRequest(pause=first.pause))
    assert (await service.load()).paused
    await service.stub.Resume(c.ResumeRequest(pause=second.pause))
    assert not (await service.load()).paused
    assert (await service.stub.Pause(c.PauseRequest())).pause > second.pause
    await resume(service)
