"""A scheduler that goes away: what runs ends, what is new goes elsewhere, and what is left is handed over."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.process.service import Stop
from services.common.rpc.status import from_rpc_error, from_status
from services.scheduler.server import SERVICE
from tests.fakes.model import continuation
from tests.gateway.deployment import eventually_async
from tests.scheduler.service import PROMPT, Service, session, start, status_of
from tests.scheduler.test_session import request
from tokasaurus.scheduler.v1 import generate_pb2

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def running(service: Service, client, handle: int = 1, **fields) -> None:
    """A request has begun, and goes on when the worker is released."""
    service.worker.hold()
    await client.submit(handle, **request(**fields))
    await client.decided(handle)


def begin(service: Service, stop: Stop | None = None) -> asyncio.Task:
    return asyncio.create_task(service.server.drain(stop or Stop()))


async def until_draining(client) -> None:
    await client.until(lambda message: message.load.not_ready_reason == "draining")
    assert not client.loads[-1].ready


async def ended_with(call) -> str:
    """The reason in the UNAVAILABLE that a stream ends with, behind what there still was on it."""

    async def read_on() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read_on()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    return from_rpc_error(ended.value).reason


async def test_what_runs_ends_as_if_nothing_were_and_what_is_new_is_refused():
    async with start() as service, session(service) as client:
        await running(service, client, seed=5)
        drain = begin(service)
        await until_draining(client)

        await client.submit(2, **request())
        await client.decided(2)
        refused = from_status(client.rejected[2])
        assert (type(refused).__name__, refused.reason) == ("Unavailable", "DRAINING")
        error = await status_of(service.stub.Generate(generate_pb2.GenerateRequest(**request())))
        assert (error.code(), from_rpc_error(error).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")

        assert not drain.done()
        service.worker.release()
        await client.finished(1)
        assert client.samples[1].tokens == continuation(service.worker.shape, PROMPT, 10, seed=5)
        await drain
        assert await ended_with(client.call) == "DRAINING"


@pytest.mark.parametrize("hurried", [True, False])
async def test_what_is_left_at_the_end_is_told_to_go_elsewhere(hurried):
    async with start(drain_seconds=60 if hurried else 0) as service, session(service) as client:
        await running(service, client)
        direct = service.stub.Generate(generate_pb2.GenerateRequest(**request()))
        assert (await direct.read()).HasField("accepted")
        stop = Stop()
        if hurried:
            stop.at_once.set()
        await begin(service, stop)
        for call in (client.call, direct):
            assert await ended_with(call) == "DRAINING"
        service.worker.release()


async def test_without_a_worker_nothing_is_waited_for():
    async with start(drain_seconds=1e6) as service, session(service) as client:
        await running(service, client)
        drain = begin(service)
        await until_draining(client)
        await service.worker.stop()
        assert await ended_with(client.call) == "DRAINING"
        await drain


async def test_health_is_watched_and_follows():
    async with start() as service, session(service) as client:
        stub = health_pb2_grpc.HealthStub(service.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await running(service, client)
        drain = begin(service)
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
        service.worker.release()
        await drain


async def test_an_idle_scheduler_leaves_at_once_and_its_worker_hears_of_it():
    async with start(drain_seconds=1e6) as service:
        await asyncio.wait_for(begin(service), 30)
        assert service.worker.farewells == 0
    assert service.worker.farewells == 1


async def test_the_step_loops_turns_are_progress():
    async with start(step_deadline=1) as service:
        server = service.server
        server.has_progressed()
        await eventually_async(server.has_progressed)
        stuck, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def block(core) -> None:
            loop.call_soon_threadsafe(stuck.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        blocked = asyncio.wrap_future(server.engine.ask(block))
        await stuck.wait()
        await service.until_health(False)  # asked for as long as the deadline
        server.has_progressed()
        assert not server.has_progressed()
        go_on.set()
        await blocked
        await service.until_health(True)
        assert server.has_progressed()
