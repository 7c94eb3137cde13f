"""A worker that is late, lost, restarted, or wrong: clients notice a pause at most."""

import asyncio

import grpc
import pytest
from structlog.testing import capture_logs

from services.common.config import SchedulerConfig
from services.common.errors import FailedPrecondition
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.server import SchedulerServer, serve
from services.scheduler.workers import link
from tests.fakes.model import FakeShape, continuation
from tests.fakes.worker import FakeWorker
from tests.scheduler.service import PROMPT, Service, session, start, status_of
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2, session_pb2
from tokasaurus.worker.v1 import worker_pb2_grpc


def request(seed: int, most: int = 60) -> dict:
    return {
        "tokens": g.TokenPrompt(token_ids=PROMPT),
        "sampling": g.Sampling(seed=seed),
        "stopping": g.Stopping(max_tokens=most, strings=["never to be seen"]),
    }


@pytest.mark.parametrize("steps_ahead", [2, 5])
async def test_a_crash_in_the_middle_changes_no_token(steps_ahead):
    async with start(scheduling_steps_ahead=steps_ahead) as service:
        worker = service.worker
        async with session(service) as client:
            worker.hold()
            for handle in range(0, 40, 4):
                await client.submit(handle, **request(handle), n=4)
            await client.decided(36)
            worker.release(25)
            await worker.received(25 + steps_ahead)
            worker.crash()
            worker.release()
            await client.finished(*range(40))
            for handle in range(40):
                first = handle - handle % 4
                expected = continuation(worker.shape, PROMPT, 60, seed=first, sample_index=handle % 4)
                assert client.samples[handle].tokens == expected
        load = await service.load()
        assert load.counters.worker_restarts == 1
        assert load.counters.recomputed_tokens > 0
        assert worker.streams == 2


async def test_requests_wait_for_a_worker_that_is_gone():
    async with start() as service:
        worker = service.worker
        await worker.stop()
        await service.until_health(False)
        async with session(service) as client:
            await client.submit(0, **request(1, most=5))
            await client.decided(0)
            assert not (await service.load()).ready
            await worker.start(worker.address)
            await client.finished(0)
            assert client.samples[0].tokens == continuation(worker.shape, PROMPT, 5, seed=1)
        await service.until_health(True)


async def test_without_a_worker_there_is_no_service_yet():
    server = SchedulerServer(SchedulerConfig(worker_addresses=("127.0.0.1:1",), scheduler_listen="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        service = Service([], server, channel)
        await service.until_health(False)
        error = await status_of(service.stub.Generate(g.GenerateRequest(**request(1))))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        load = (await service.stub.GetLoad(observe_pb2.GetLoadRequest())).load
        assert not load.ready
        assert load.not_ready_reason.startswith("its worker does not answer yet")
    await server.stop()


async def test_a_worker_that_loads_is_connected_the_moment_it_is_ready():
    """Its health is watched: it is not asked again and again, with growing pauses."""
    worker = FakeWorker()
    address = await worker.start(loading=True)
    server = SchedulerServer(SchedulerConfig(worker_addresses=(address,), scheduler_listen="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        service = Service([worker], server, channel)
        while "is not ready yet: it may still be loading its model" not in (await service.load()).not_ready_reason:
            pass
        assert worker.asked == 0
        await worker.load()
        await service.until_health(True)
        assert worker.asked == 1
    await server.stop()
    await worker.stop()


async def test_a_worker_without_a_health_service_is_asked_at_once():
    worker, rpc = FakeWorker(), grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, rpc)
    address = f"127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    await rpc.start()
    server = SchedulerServer(SchedulerConfig(worker_addresses=(address,), scheduler_listen="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        await Service([worker], server, channel).until_health(True)
    await server.stop()
    await rpc.stop(None)


async def test_the_log_of_an_ordinary_start_and_stop_has_no_warning():
    with capture_logs() as lines:
        worker = FakeWorker()
        address = await worker.start(loading=True)
        server = SchedulerServer(SchedulerConfig(worker_addresses=(address,), scheduler_listen="127.0.0.1:0"))
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            await worker.load()
            await Service([worker], server, channel).until_health(True)
        await server.stop()
        await worker.stop()
    assert {line["event"] for line in lines} >= {"worker connected", "ready", "worker lost"}
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_the_log_warns_of_a_worker_that_is_lost():
    async with start() as service:
        with capture_logs() as lines:
            await service.worker.stop()
            await service.until_health(False)
    assert "worker lost" in {line["event"] for line in lines if line["log_level"] == "warning"}


@pytest.mark.parametrize(
    ("shape", "flags", "reason"),
    [
        ({"vocab_size": 100}, {}, "start both with the same model"),
        ({"max_micro_batches": 1}, {"pp_size": 2}, "start both with the same pp_size"),
    ],
)
async def test_a_first_worker_that_can_never_be_used_ends_the_start_with_the_reason(shape, flags, reason):
    worker = FakeWorker(FakeShape(**shape))
    config = SchedulerConfig(worker_addresses=(await worker.start(),), scheduler_listen="127.0.0.1:0", **flags)
    with pytest.raises(FailedPrecondition, match=reason):
        await asyncio.wait_for(serve(config, asyncio.Event()), 30)
    assert worker.streams == 0
    await worker.stop()


async def test_a_worker_without_shared_prefix_attention_gets_no_groups():
    worker = FakeWorker(FakeShape(hydragen=False))
    flags = {"use_hydragen": True, "hydragen_min_group_size": 2, "hydragen_min_prefix_len": 16}
    async with start(worker=worker, **flags) as service:
        prompt = g.TokenPrompt(token_ids=[60] * 1024)
        samples = await service.generate(tokens=prompt, n=128, stopping=g.Stopping(max_tokens=30))
        assert {len(sample.tokens) for sample in samples.values()} == {30}
        assert (await service.load()).counters.hydragen_rows == 0


async def test_a_link_that_cannot_go_on_ends_the_scheduler_with_the_reason(monkeypatch):
    def fail(result) -> None:
        raise MemoryError("no room for a result")

    monkeypatch.setattr(link, "decode_result", fail)
    worker = FakeWorker()
    async with start(worker=worker) as service:
        asking = service.stub.Generate(g.GenerateRequest(**request(1)))
        with pytest.raises(FailedPrecondition, match="the link to the worker failed: MemoryError"):
            await asyncio.wait_for(service.server.wait(asyncio.Event()), 30)
        asking.cancel()


@pytest.mark.parametrize("together", [True, False])
async def test_plans_that_are_ready_together_go_in_one_message_if_the_worker_takes_them(together):
    worker = FakeWorker()
    worker.takes_together = together
    async with start(worker=worker, scheduling_steps_ahead=8) as service:
        async with session(service) as client:
            worker.hold()
            for handle in range(12):
                await client.submit(handle, **request(handle))
            await worker.received(8)
            worker.release()
            await client.finished(*range(12))
            for handle in range(12):
                assert client.samples[handle].tokens == continuation(worker.shape, PROMPT, 60, seed=handle)
        assert (worker.largest_message > 1) is together
        assert worker.streams == 1


class KeenWorker(FakeWorker):
    """Says twice that it is ready."""

    async def RunSteps(self, request_iterator, context):
        async for response in super().RunSteps(request_iterator, context):
            yield response
            if response.HasField("ready"):
                yield response


async def test_a_worker_that_says_twice_that_it_is_ready_stays_connected():
    worker = KeenWorker()
    async with start(worker=worker) as service, session(service) as client:
        await client.submit(0, **request(1, most=5))
        await client.finished(0)
        assert client.samples[0].tokens == continuation(worker.shape, PROMPT, 5, seed=1)
        assert worker.streams == 1


class AskedWorker(FakeWorker):
    """Notes that it was asked what it is."""

    def __init__(self, shape: FakeShape) -> None:
        super().__init__(shape)
        self.asked = asyncio.Event()

    async def GetWorkerInfo(self, request, context):
        self.asked.set()
        return await super().GetWorkerInfo(request, context)


async def test_a_later_worker_that_cannot_be_used_is_waited_out():
    async with start() as service:
        right = service.worker
        await right.stop()
        await service.until_health(False)
        wrong = AskedWorker(FakeShape(vocab_size=100))
        await wrong.start(right.address)
        async with session(service) as client:
            await client.submit(0, **request(1, most=5))
            await client.decided(0)
            await wrong.asked.wait()
            assert not (await service.load()).ready
            await wrong.stop()
            await right.start(right.address)
            await client.finished(0)
            assert client.samples[0].tokens == continuation(right.shape, PROMPT, 5, seed=1)
        assert wrong.streams == 0
        await service.until_health(True)


async def test_one_bad_sequence_does_not_hurt_the_others():
    async with start() as service:
        service.worker.fail_tokens = {77: "logits are not numbers"}
        async with session(service) as client:
            service.worker.crash()  # the next stream's model knows what fails
            await client.submit(0, tokens=g.TokenPrompt(token_ids=[77, 78, 79]))
            await client.submit(1, **request(5, most=8))
            await client.finished(0, 1)
            assert client.samples[0].finish.reason == g.FINISH_REASON_ERROR
            assert "not numbers" in client.samples[0].finish.error.message
            assert client.samples[1].tokens == continuation(service.worker.shape, PROMPT, 8, seed=5)


async def test_a_worker_that_hangs_is_given_up_and_its_requests_go_on():
    async with start(step_deadline=1) as service:
        worker = service.worker
        async with session(service) as client:
            worker.hold()
            await client.submit(0, **request(1, most=5))
            await worker.received(1)
            while worker.streams < 2:  # the second connection is the successor's
                await client.send(heartbeat=session_pb2.Heartbeat(nonce=1))
                await client.read()
            worker.release()
            await client.finished(0)
            assert client.samples[0].tokens == continuation(worker.shape, PROMPT, 5, seed=1)
        assert (await service.load()).counters.worker_restarts >= 1


class MuteWorker(FakeWorker):
    """Does not answer the first hello."""

    hellos = 0

    async def RunSteps(self, request_iterator, context):
        self.hellos += 1
        if self.hellos == 1:
            await asyncio.Event().wait()
        async for response in super().RunSteps(request_iterator, context):
            yield response


async def test_a_hello_without_an_answer_is_said_again(monkeypatch):
    monkeypatch.setattr("services.scheduler.workers.link._READY_TIMEOUT_S", 0.2)
    async with start(worker=MuteWorker()) as service:
        assert service.worker.hellos == 2
        samples = await service.generate(**request(1, most=5))
        assert samples[0].tokens == continuation(service.worker.shape, PROMPT, 5, seed=1)


async def test_a_step_loop_that_fails_ends_the_process(monkeypatch):
    from services.common.errors import Internal

    def broken(self, now_ms):
        raise RuntimeError("boom")

    monkeypatch.setattr(Scheduler, "end_overdue", broken)
    with pytest.raises(Internal, match="boom"):
        await serve(SchedulerConfig(worker_addresses=("127.0.0.1:1",), scheduler_listen="127.0.0.1:0"), asyncio.Event())
