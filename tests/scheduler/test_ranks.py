"""One scheduler and the workers of a replica: the same plans to every rank, tokens from one of them, one fate."""

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
import pytest

from services.common.config import SchedulerConfig
from services.common.errors import FailedPrecondition
from services.common.flags import FlagError, load
from services.common.plan.result import StepResult
from services.scheduler.core.plan import NO_SLOTS
from services.scheduler.server import SchedulerServer, serve
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.stream import RankStream, ReceivedResult, WorkerStream
from services.scheduler.workers.weights import WorkerWeights
from tests.fakes.model import FakeShape, continuation
from tests.fakes.worker import FakeReplica, FakeWorker
from tests.scheduler.service import PROMPT, Service, session, start
from tests.scheduler.test_plan_messages import sent_steps
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import session_pb2
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

WEIGHTS = WorkerWeights({})


def request(seed: int, most: int = 60) -> dict:
    return {
        "tokens": g.TokenPrompt(token_ids=PROMPT),
        "sampling": g.Sampling(seed=seed),
        "stopping": g.Stopping(max_tokens=most),
    }


def expected(seed: int, most: int = 60) -> list[int]:
    return continuation(FakeShape(), PROMPT, most, seed=seed)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 3), (2, 2)])
async def test_every_rank_gets_the_same_plans(tp_size, pp_size):
    replica = FakeReplica(tp_size=tp_size, pp_size=pp_size)
    for worker in replica.workers:
        worker.record = True
    async with start(replica=replica, pp_size=pp_size) as service:
        async with session(service) as client:
            for handle in range(12):
                await client.submit(handle, **request(handle))
            await client.finished(*range(12))
            for handle in range(12):
                assert client.samples[handle].tokens == expected(handle)
        plans = service.worker.plans
        assert len(plans) >= 60
        assert all(worker.plans == plans for worker in replica.workers)
        micro_batches = pp_size + 1 if pp_size > 1 else 0
        assert {len(plan.micro_batch_rows) for plan in plans if plan.HasField("batch")} == {micro_batches}
        assert all(worker.stream_ids == service.worker.stream_ids != [""] for worker in replica.workers)


@pytest.mark.parametrize(("tp_size", "pp_size", "plans"), [(2, 1, 2), (1, 2, 3), (1, 4, 3)])
async def test_several_stages_have_one_more_plan_in_flight(tp_size, pp_size, plans):
    """The first stage must find the next one while the last is still at the one before."""
    replica = FakeReplica(tp_size=tp_size, pp_size=pp_size)
    async with start(replica=replica, pp_size=pp_size) as service, session(service) as client:
        service.worker.hold()
        await client.submit(0, **request(1, most=20))
        for worker in replica.workers:
            await worker.received(plans)
        assert (await service.load()).plans_in_flight == plans
        service.worker.release()
        await client.finished(0)


class TalkativeRank(FakeWorker):
    """Its results have tokens and times whether or not they should."""

    async def _next_result(self, plans, end):
        result = await super()._next_result(plans, end)
        if result is not None and not self.shape.reports:
            result.slots.append(0)
            result.token_ids.append(99)
            result.failures.add(slot=0, message="not computed")
            result.timing.device_ns = 10**9
        return result


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
async def test_only_the_rank_that_reports_is_believed(tp_size, pp_size):
    replica = FakeReplica(tp_size=tp_size, pp_size=pp_size, kind=TalkativeRank)
    async with start(replica=replica, pp_size=pp_size) as service:
        samples = await service.generate(**request(3))
        assert samples[0].tokens == expected(3)
        counters = (await service.load()).counters
        assert (counters.device_busy_ns, counters.worker_restarts) == (0, 0)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("late", [0, 1])
async def test_no_rank_has_more_plans_than_agreed_however_late_it_is(tp_size, pp_size, late):
    agreed = 3
    replica = FakeReplica(FakeShape(max_plans_in_flight=agreed), tp_size=tp_size, pp_size=pp_size)
    slow, fast = replica.workers[late], replica.workers[1 - late]
    async with start(replica=replica, pp_size=pp_size, scheduling_steps_ahead=agreed) as service:
        async with session(service) as client:
            slow.hold()
            for handle in range(4):
                await client.submit(handle, **request(handle))
            for answers in range(20):
                await slow.received(agreed + answers)
                await fast.received(agreed + answers)
                assert slow.answered == answers
                slow.release(1)
            slow.release()
            await client.finished(*range(4))
            for handle in range(4):
                assert client.samples[handle].tokens == expected(handle)
        assert slow.most_unanswered == agreed
        assert fast.most_unanswered <= agreed


class AskedWorker(FakeWorker):
    """Counts how often it was asked what it is."""

    asked = 0

    async def GetWorkerInfo(self, request, context):
        async with self._progress:
            self.asked += 1
            self._progress.notify_all()
        return await super().GetWorkerInfo(request, context)

    async def was_asked(self, times: int) -> None:
        async with self._progress:
            await self._progress.wait_for(lambda: self.asked >= times)


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_loss_of_one_rank_ends_all_streams_and_what_ran_goes_on_when_all_are_back(lost):
    replica = FakeReplica(tp_size=2, kind=AskedWorker)
    there, gone = replica.workers[1 - lost], replica.workers[lost]
    async with start(replica=replica) as service:
        async with session(service) as client:
            for worker in replica.workers:
                worker.hold()
            for handle in range(8):
                await client.submit(handle, **request(handle))
            await client.decided(7)
            for worker in replica.workers:
                worker.release(25)
            for worker in replica.workers:
                await worker.received(25 + 2)
            gone.crash()  # and comes back at once, before the other has noticed
            await there.at_rest.wait()
            await gone.was_asked(3)
            assert [worker.streams for worker in replica.workers] == [1, 1]
            assert not (await service.load()).ready
            replica.meet()
            for worker in replica.workers:
                worker.release()
            await client.finished(*range(8))
            for handle in range(8):
                assert client.samples[handle].tokens == expected(handle)
        assert (await service.load()).counters.worker_restarts == 1
        assert there.stream_ids == gone.stream_ids
        assert len(set(there.stream_ids)) == 2


async def test_a_rank_that_hangs_is_given_up_with_the_others():
    replica = FakeReplica(tp_size=2)
    hanging, other = replica.workers[1], replica.workers[0]
    async with start(replica=replica, step_deadline=1) as service, session(service) as client:
        hanging.hold()
        await client.submit(0, **request(1, most=5))
        await hanging.received(1)
        while min(hanging.streams, other.streams) < 2:
            await client.send(heartbeat=session_pb2.Heartbeat(nonce=1))
            await client.read()
        hanging.release()
        await client.finished(0)
        assert client.samples[0].tokens == expected(1, 5)


async def test_a_scheduler_that_stops_leaves_no_rank_with_a_plan_less(monkeypatch):
    """Ranks wait for one another: a plan that only some of them have would never end."""
    monkeypatch.setattr("services.scheduler.workers.link._STOP_TIMEOUT_S", 60.0)  # a busy machine is slow
    replica = FakeReplica(tp_size=2, pp_size=2)
    for worker in replica.workers:
        worker.record = True
    addresses = tuple([await worker.start() for worker in replica.workers])
    config = SchedulerConfig(worker_addresses=addresses, scheduler_listen="127.0.0.1:0", pp_size=2)
    server = SchedulerServer(config)
    async with AsyncExitStack() as servers:
        for worker in replica.workers:
            servers.push_async_callback(worker.stop)
        channel = await servers.enter_async_context(grpc.aio.insecure_channel(await server.start()))
        service = Service(replica.workers, server, channel)
        await service.until_health(True)
        async with session(service) as client:
            try:
                for handle in range(4):
                    await client.submit(handle, **request(handle, most=2000))
                await replica.workers[0].received(40)
            finally:
                await server.stop()
        for worker in replica.workers:
            await worker.at_rest.wait()
            assert (worker.farewells, worker.violations) == (1, [])
            assert worker.plans == service.worker.plans
            assert worker.answered == len(worker.plans)


class MuteWorker(FakeWorker):
    """One rank does not answer its first hello."""

    hellos = 0

    async def RunSteps(self, request_iterator, context):
        self.hellos += 1
        if self.hellos == 1 and self.shape.tp_rank == 1:
            await asyncio.Event().wait()
        async for response in super().RunSteps(request_iterator, context):
            yield response


async def test_a_hello_that_one_rank_does_not_answer_is_said_again_to_all(monkeypatch):
    monkeypatch.setattr("services.scheduler.workers.link._READY_TIMEOUT_S", 0.2)
    async with start(replica=FakeReplica(tp_size=2, kind=MuteWorker)) as service:
        assert [worker.hellos for worker in service.workers] == [2, 2]
        heard, mute = service.workers
        assert heard.stream_ids[1:] == mute.stream_ids
        assert heard.stream_ids[0] != heard.stream_ids[1]
        samples = await service.generate(**request(1, most=5))
        assert samples[0].tokens == expected(1, 5)
        assert (await service.load()).counters.worker_restarts == 0


async def test_a_rank_that_is_not_up_is_waited_for():
    replica = FakeReplica(pp_size=2)
    first, last = replica.workers
    addresses = (await first.start(), await last.start())
    await last.stop()
    replica.meet()
    config = SchedulerConfig(worker_addresses=addresses, scheduler_listen="127.0.0.1:0", pp_size=2)
    server = SchedulerServer(config)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        service = Service(replica.workers, server, channel)
        await service.until_health(False)
        await last.start(last.address)
        await service.until_health(True)
        assert (await service.generate(**request(2, most=5)))[0].tokens == expected(2, 5)
    await server.stop()
    await first.stop()
    await last.stop()


def test_an_address_is_named_once():
    with pytest.raises(FlagError, match=r"flag worker_addresses=.*: a:1 is named twice; name the address of each rank"):
        load(SchedulerConfig, ["worker_addresses=a:1,b:2,a:1"], {})
    assert load(SchedulerConfig, ["worker_addresses=a:1,b:2"], {}).worker_addresses == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("sizes", "named", "flags", "reason"),
    [
        ({"tp_size": 2}, [0], {}, "flag worker_addresses=.*: 1 named, expected 2"),
        ({"pp_size": 2}, [0, 1], {}, "flag pp_size=1 of the scheduler and pp_size=2 of its workers: start both"),
        ({"tp_size": 2}, [0, 1], {"pp_size": 2}, "flag pp_size=2 of the scheduler and pp_size=1 of its workers"),
        ({"pp_size": 2}, [0, 1], {"pp_size": 2, "pp_num_buffer_stages": 7}, "supports 8 at most: lower pp_num_buffer"),
    ],
)
async def test_flags_that_never_go_together_end_the_start_with_the_reason(sizes, named, flags, reason):
    replica = FakeReplica(**sizes)
    addresses = [await worker.start() for worker in replica.workers]
    chosen = tuple(addresses[index] for index in named)
    config = SchedulerConfig(worker_addresses=chosen, scheduler_listen="127.0.0.1:0", **flags)
    with pytest.raises(FailedPrecondition, match=reason):
        await asyncio.wait_for(serve(config, asyncio.Event()), 30)
    for worker in replica.workers:
        assert worker.streams == 0
        await worker.stop()


class Events:
    """Keeps what a link or a stream says, for an asyncio loop."""

    def __init__(self) -> None:
        self.said: asyncio.Queue = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def _say(self, *words) -> None:
        self._loop.call_soon_threadsafe(self.said.put_nowait, words)

    def worker_connected(self, stream) -> None:
        self._say("connected", stream)

    def worker_result(self, stream, answer) -> None:
        self._say("answered", answer)

    def worker_lost(self, stream, reason, *, stopping=False) -> None:
        self._say("lost", reason)

    def worker_missing(self, reason) -> None:
        self._say("missing", reason)


class LateWorker(FakeWorker):
    """One rank is ready when the test says so."""

    def __init__(self, shape: FakeShape) -> None:
        super().__init__(shape)
        self.told = asyncio.Event()  # the hello, and where it may be, it is ready
        self.may_be_ready = asyncio.Event()

    async def RunSteps(self, request_iterator, context):
        if self.shape.tp_rank == 1:
            self.told.set()
            await self.may_be_ready.wait()
        async for response in super().RunSteps(request_iterator, context):
            self.told.set()
            yield response


@pytest.mark.parametrize("lost", [0, 1])
async def test_what_is_said_of_several_ranks_is_said_once_and_a_loss_names_the_address(lost):
    replica, events = FakeReplica(tp_size=2, kind=LateWorker), Events()
    addresses = [await worker.start() for worker in replica.workers]
    link = WorkerLink(addresses, "test", 4, events, lambda info: None, lambda reason: None)
    link.start()
    for worker in replica.workers:
        await worker.told.wait()
    assert events.said.empty()
    replica.workers[1].may_be_ready.set()
    word, stream = await events.said.get()
    assert (word, stream.plans_in_flight) == ("connected", 4)
    stream.send(plan_pb2.StepPlan(step=1))
    word, answer = await events.said.get()
    assert (word, answer.result.step) == ("answered", 1)
    replica.workers[lost].crash()
    word, reason = await events.said.get()
    assert word == "lost"
    assert f"worker {addresses[lost]}: UNAVAILABLE: the fake worker crashed" in reason
    await asyncio.to_thread(link.stop)
    assert events.said.empty()
    for worker in replica.workers:
        await worker.stop()


async def test_an_answer_is_held_back_until_every_rank_has_given_it():
    events = Events()
    ranks = [RankStream("a:1", reports=False), RankStream("b:2", reports=True), RankStream("c:3", reports=False)]
    stream = WorkerStream(worker_pb2.WorkerInfo(), 4, ranks, events, WEIGHTS, "")
    first, reporter, other = ranks

    def answer(step: int) -> ReceivedResult:
        return ReceivedResult(StepResult(step, NO_SLOTS, NO_SLOTS), plan_pb2.StepResult(step=step), time.monotonic())

    async def handed_on() -> list[int]:
        await asyncio.sleep(0)
        return [events.said.get_nowait()[1].result.step for _ in range(events.said.qsize())]

    stream.result_received(first, None)
    stream.result_received(first, None)
    stream.result_received(reporter, answer(1))
    assert await handed_on() == []
    stream.result_received(other, None)
    assert await handed_on() == [1]
    stream.result_received(reporter, answer(2))
    stream.result_received(reporter, answer(3))
    stream.result_received(other, None)
    assert await handed_on() == [2]
    stream.result_received(other, None)
    stream.result_received(first, None)
    assert await handed_on() == [3]


@pytest.mark.parametrize("together", [True, False])
async def test_a_plan_after_the_last_one_reaches_no_rank(together):
    ranks = [RankStream("a:1", reports=False), RankStream("b:2", reports=True)]
    stream = WorkerStream(worker_pb2.WorkerInfo(), 3, ranks, Events(), WEIGHTS, "")
    for rank in ranks:
        rank.takes_together = together
    stream.send(plan_pb2.StepPlan(step=1))
    stream.finish()
    stream.send(plan_pb2.StepPlan(step=2))
    assert [sent_steps(rank) for rank in ranks] == [[1], [1]]
