"""Ends of requests that the core does not have yet: their grammars are being checked, or the step loop is behind."""

import asyncio
import threading

import grpc
import pytest
from google.rpc import code_pb2

from services.common.errors import Cancelled
from services.common.rpc.status import from_rpc_error, from_status
from services.scheduler.api.pending_grammars import PendingGrammars
from services.scheduler.grammar.checker import GrammarChecker
from tests.fakes.model import FakeShape
from tests.scheduler.service import PROMPT, Service, session, start, status_of
from tests.scheduler.test_weights import stage
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2, sleep_pb2

SHAPE = FakeShape(max_slots=2)
FIELDS = {"tokens": g.TokenPrompt(token_ids=PROMPT), "stopping": g.Stopping(max_tokens=10)}
CONSTRAINED = FIELDS | {"sampling": g.Sampling(grammar=g.Grammar(regex="z*"))}
ABORT = c.PAUSE_MODE_ABORT


class Checks:
    """The checks of grammars, which end when ``release`` is called."""

    def __init__(self, monkeypatch) -> None:
        check, self._released, self._begun = GrammarChecker.check, asyncio.Event(), asyncio.Semaphore(0)

        async def check_later(*given) -> None:
            self._begun.release()
            await self._released.wait()
            await check(*given)

        monkeypatch.setattr(GrammarChecker, "check", check_later)

    async def until_begun(self, count: int) -> None:
        for _ in range(count):
            await self._begun.acquire()

    def release(self) -> None:
        self._released.set()


@pytest.fixture
async def checks(monkeypatch):
    return Checks(monkeypatch)


async def abort(service: Service) -> int:
    return (await service.stub.AbortRequests(c.AbortRequestsRequest(request_ids=["a"]))).samples


async def pause(service: Service) -> int:
    return (await service.stub.Pause(c.PauseRequest(mode=ABORT))).aborted_samples


async def pause_and_sleep(service: Service) -> int:
    await service.stub.Pause(c.PauseRequest())
    return await sleep(service)


async def sleep(service: Service) -> int:
    slept = await service.stub.Sleep(sleep_pb2.SleepRequest(mode=ABORT))
    await service.stub.Wake(sleep_pb2.WakeRequest())
    return slept.aborted_samples


async def commit(service: Service) -> int:
    request = c.CommitWeightsRequest(update_id=await stage(service, 1), mode=ABORT)
    return (await service.stub.CommitWeights(request)).aborted_samples


async def cancel(service: Service) -> int:
    return (await service.stub.CancelRequest(observe_pb2.CancelRequestRequest(request_id="a"))).samples


@pytest.mark.parametrize("end", [abort, pause, sleep, pause_and_sleep, commit])
async def test_requests_whose_grammars_are_checked_are_aborted(checks, end):
    async with start(SHAPE) as service, session(service) as client, session(service) as other:
        await client.submit(0, request_id="a", n=2, **CONSTRAINED)
        await other.submit(0, request_id="a-1", **CONSTRAINED)
        alone = asyncio.ensure_future(service.generate(request_id="a-2", **CONSTRAINED))
        await checks.until_begun(3)
        assert await end(service) == 4
        await client.submit(2, request_id="b", **CONSTRAINED)
        await checks.until_begun(1)
        checks.release()
        await service.stub.Resume(c.ResumeRequest())
        await client.finished(0, 1, 2)
        await other.finished(0)
        samples = [client.samples[0], client.samples[1], other.samples[0], (await alone)[0]]
        assert [each.finish.reason for each in samples] == [g.FINISH_REASON_ABORTED] * 4
        assert client.samples[2].finish.reason != g.FINISH_REASON_ABORTED


async def test_an_abort_reaches_a_request_whose_check_has_not_begun(monkeypatch):
    begin, aborted = PendingGrammars.begin, []

    def begin_and_abort(self, request, name):
        begin(self, request, name)
        aborted.append(self._unchecked.abort(None))

    monkeypatch.setattr(PendingGrammars, "begin", begin_and_abort)
    async with start(SHAPE) as service, session(service) as client:
        await client.submit(0, request_id="a", n=2, **CONSTRAINED)
        await client.finished(0, 1)
        assert [client.samples[handle].finish.reason for handle in range(2)] == [g.FINISH_REASON_ABORTED] * 2
    assert aborted == [2]


async def test_an_abort_leaves_requests_with_other_ids(checks):
    async with start(SHAPE) as service, session(service) as client:
        await client.submit(0, request_id="a", **CONSTRAINED)
        await client.submit(1, request_id="ab", **CONSTRAINED)
        await checks.until_begun(2)
        assert await abort(service) == 1
        checks.release()
        await client.finished(0, 1)
        ended = [client.samples[handle].finish.reason == g.FINISH_REASON_ABORTED for handle in range(2)]
        assert ended == [True, False]


async def test_a_commit_during_a_pause_leaves_requests_whose_grammars_are_checked(checks):
    async with start(SHAPE) as service, session(service) as client:
        await client.submit(0, request_id="a", **CONSTRAINED)
        await checks.until_begun(1)
        await service.stub.Pause(c.PauseRequest())
        assert await commit(service) == 0
        checks.release()
        await service.stub.Resume(c.ResumeRequest())
        await client.finished(0)
        assert client.samples[0].finish.reason != g.FINISH_REASON_ABORTED


async def test_an_operator_cancels_requests_whose_grammars_are_checked(checks):
    async with start(SHAPE) as service, session(service) as client:
        await client.submit(0, request_id="a", n=2, **CONSTRAINED)
        call = service.stub.Generate(g.GenerateRequest(request_id="b", **CONSTRAINED))
        ended = asyncio.ensure_future(status_of(call))
        await checks.until_begun(2)
        assert await cancel(service) == 2
        await service.stub.CancelRequest(observe_pb2.CancelRequestRequest(request_id="b"))
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await service.stub.CancelRequest(observe_pb2.CancelRequestRequest(request_id="c"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        checks.release()
        await client.decided(0)
        assert client.rejected[0].code == code_pb2.CANCELLED
        for error in (from_status(client.rejected[0]), from_rpc_error(await ended)):
            assert (type(error), error.reason) == (Cancelled, "CANCELLED_BY_OPERATOR")


@pytest.mark.parametrize("end", [abort, pause, cancel])
async def test_requests_that_the_step_loop_has_not_taken_end(end):
    async with start(SHAPE) as service, session(service) as client:
        engine, gate = service.server.engine, threading.Event()
        engine.post(gate.wait)
        await client.submit(0, request_id="a", n=2, **FIELDS)
        await until(lambda: engine.backlog == 1)
        ending = asyncio.ensure_future(end(service))
        try:
            await until(lambda: engine.backlog == 2)
        finally:
            gate.set()
        assert await ending == 2
        await client.finished(0, 1)
        reason = g.FINISH_REASON_CANCELLED if end is cancel else g.FINISH_REASON_ABORTED
        assert [client.samples[handle].finish.reason for handle in range(2)] == [reason] * 2


async def until(condition) -> None:
    """Wait until ``condition`` holds, for at most 20 s."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the step loop sets no event)
            await asyncio.sleep(0)
