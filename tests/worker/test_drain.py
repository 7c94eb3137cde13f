"""A worker that goes away ends its scheduler's stream in good order; and what its threads are at is its progress."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import WorkerConfig
from services.common.errors import Unavailable
from services.common.process.service import Stop
from services.worker.api.servicer import WorkerServicer
from services.worker.engine.engine import Engine
from services.worker.server import SERVICE, serve
from tests.gateway.deployment import eventually_async
from tests.worker.scheduler import Scheduler, admission, status_of
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Leaving:
    """A worker of this process, how to stop it, and its scheduler, connected."""

    def __init__(self) -> None:
        self.stop = Stop()
        self.progresses = None

    async def start(self, directory, socket, **flags) -> None:
        listening = asyncio.get_running_loop().create_future()
        config = WorkerConfig(
            model=str(directory),
            device="cpu",
            worker_listen=f"unix:{socket}",
            kv_cache_num_tokens=16 * 64,
            page_size=16,
            **flags,
        )
        work = serve(config, self.stop, listening=listening, on_serving=self._note)
        self.ended = asyncio.create_task(work)
        self.channel = grpc.aio.insecure_channel(await listening)
        self.scheduler = await Scheduler(self.channel).connect()
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def _note(self, progresses) -> None:
        self.progresses = progresses

    async def send(self, tokens: int = 3) -> None:
        """A plan for one sequence."""
        if self.scheduler.step:
            await self.scheduler.send()
            return
        batch = plan_pb2.Batch(slots=[0], token_counts=[tokens])
        await self.scheduler.send(admissions=[admission(0, [5, 6, 7], [0])], batch=batch)


@pytest.fixture
async def leaving(checkpoint, tmp_path, gate):
    worker = Leaving()
    gate.set()
    await worker.start(checkpoint(), tmp_path / "worker", step_deadline=1)
    yield worker
    gate.set()
    worker.stop.set()
    await worker.ended
    await worker.channel.close()


async def test_plans_that_it_has_are_answered_and_the_stream_ends_well(leaving, gate):
    gate.clear()
    await leaving.send()
    await eventually_async(lambda: not leaving.progresses())  # the compute thread is at it
    leaving.stop.set()
    watch = leaving.health.Watch(health_pb2.HealthCheckRequest())
    while (await watch.read()).status != NOT_SERVING:
        pass
    watch.cancel()
    info = leaving.scheduler.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    assert await status_of(info) == (grpc.StatusCode.UNAVAILABLE, "the worker is going away")
    gate.set()
    assert (await leaving.scheduler.result()).step == 1
    assert await leaving.scheduler.call.read() is grpc.aio.EOF
    assert await leaving.scheduler.call.code() is grpc.StatusCode.OK
    await leaving.ended


async def test_an_idle_worker_leaves_at_once(leaving):
    leaving.stop.set()
    assert await leaving.scheduler.call.read() is grpc.aio.EOF
    assert await leaving.scheduler.call.code() is grpc.StatusCode.OK
    await leaving.ended


async def test_a_scheduler_that_comes_while_it_leaves_is_refused_and_not_waited_for():
    """Behind the first look at whether it leaves, and before its stream is open."""
    servicer, info = WorkerServicer(Engine(lambda: None)), worker_pb2.WorkerInfo(max_plans_in_flight=1)
    servicer.info = info

    def requests():
        servicer.drain(0)
        yield worker_pb2.RunStepsRequest(hello=worker_pb2.Hello(plans_in_flight=1))

    with pytest.raises(Unavailable, match="going away"):
        next(servicer.RunSteps(requests(), None))
    servicer.drain(1e6)


async def test_it_does_not_wait_when_it_has_to_be_at_once(leaving, gate, monkeypatch):
    monkeypatch.setattr("services.worker.server.STOP_GRACE_S", 0.1)
    gate.clear()
    await leaving.send()
    leaving.stop.at_once.set()
    leaving.stop.set()
    await leaving.ended


async def test_progress_and_health_are_those_of_the_compute_thread(leaving, gate):
    watches = [leaving.health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    assert leaving.progresses()
    assert leaving.progresses()  # there is nothing to do

    gate.clear()
    await leaving.send()
    await eventually_async(lambda: not leaving.progresses())
    for watch in watches:  # everything else answers; the step has been running for `step_deadline`
        assert (await watch.read()).status == NOT_SERVING
    gate.set()
    await leaving.scheduler.result()
    for watch in watches:
        assert (await watch.read()).status == SERVING
        watch.cancel()
    assert leaving.progresses()
