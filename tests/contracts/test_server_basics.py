"""What every gRPC server of ours does: health, reflection, and errors as statuses with details."""

import asyncio
import inspect

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from services.common import errors
from services.common.rpc.blocking import BlockingRpcServer
from services.common.rpc.probe import probe
from services.common.rpc.server import RpcServer
from services.common.rpc.status import from_rpc_error, from_status, to_status
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc, session_pb2

SERVICE = "tokasaurus.scheduler.v1.SchedulerService"


class Servicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Raises whatever the test put into ``error``."""

    error: Exception

    async def GetLoad(self, request, context):
        raise self.error

    async def WatchPlans(self, request, context):
        yield observe_pb2.WatchPlansResponse(step=1)
        raise self.error

    async def Session(self, requests, context):
        async for request in requests:
            yield session_pb2.SessionResponse(heartbeat=request.heartbeat)


class BlockingServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The same for a server with threads."""

    error: Exception

    def GetLoad(self, request, context):
        raise self.error

    def WatchPlans(self, request, context):
        yield observe_pb2.WatchPlansResponse(step=1)
        raise self.error

    def Session(self, requests, context):
        for request in requests:
            yield session_pb2.SessionResponse(heartbeat=request.heartbeat)


async def done(found):
    """What a server's method returned, whether it has to be waited for or not."""
    return await found if inspect.isawaitable(found) else found


@pytest.fixture(params=[(Servicer, RpcServer), (BlockingServicer, BlockingRpcServer)], ids=["asyncio", "blocking"])
async def serving(request):
    servicer, server = request.param[0](), request.param[1](SERVICE)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server.grpc_server)
    address = await done(server.start("127.0.0.1:0"))
    async with grpc.aio.insecure_channel(address) as channel:
        yield servicer, server, channel
    await done(server.stop(0))


async def test_health_follows_readiness(serving):
    _, server, channel = serving
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == 2
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == 2
    await done(server.set_ready(True))
    for name in ("", SERVICE):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == 1
    assert (await watch.read()).status == 1
    watch.cancel()


async def test_a_method_that_nobody_wrote_is_no_defect(serving, caplog):
    _, _, channel = serving
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetModel(observe_pb2.GetModelRequest())
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_lists_the_service(serving):
    _, _, channel = serving
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_an_error_of_ours_carries_field_and_reason(serving):
    servicer, _, channel = serving
    servicer.error = errors.InvalidRequest("top_p=2: must be at most 1", field="sampling.top_p")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad(observe_pb2.GetLoadRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    details = rpc_status.from_call(caught.value).details
    assert any(detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request) for detail in details)
    assert bad_request.field_violations[0].field == "sampling.top_p"
    assert from_rpc_error(caught.value).field == "sampling.top_p"


async def test_an_error_in_a_stream_keeps_what_was_sent(serving):
    servicer, _, channel = serving
    servicer.error = errors.Overloaded("full", retry_after_s=1.5)
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchPlans(observe_pb2.WatchPlansRequest())
    assert (await call.read()).step == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after_s == 1.5


async def test_a_defect_does_not_leak_its_text(serving):
    servicer, _, channel = serving
    servicer.error = ValueError("a user's secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad(observe_pb2.GetLoadRequest())
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()


@pytest.mark.parametrize("method", ["GetLoad", "WatchPlans", "Session"])
async def test_bytes_that_are_no_message_are_the_clients_fault(serving, method):
    _, _, channel = serving
    path, data = f"/{SERVICE}/{method}", b"\x0a\xff\xff"

    async def send() -> None:
        match method:
            case "GetLoad":
                await channel.unary_unary(path)(data)
            case "WatchPlans":
                await channel.unary_stream(path)(data).read()
            case "Session":
                call = channel.stream_stream(path)(iter([session_pb2.SessionRequest().SerializeToString(), data]))
                assert await call.read() is not grpc.aio.EOF
                await call.read()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in caught.value.details()


@pytest.mark.parametrize("kind", [RpcServer, BlockingRpcServer])
async def test_two_servers_cannot_share_a_port(kind):
    first, second = kind(SERVICE), kind(SERVICE)
    address = await done(first.start("127.0.0.1:0"))
    with pytest.raises(errors.Unavailable, match="choose a free address"):
        await done(second.start(address))
    await done(first.stop(0))


async def test_a_call_without_a_thread_is_refused_and_not_kept_waiting(monkeypatch):
    monkeypatch.setattr("services.common.rpc.blocking._MOST_CALLS", 2)
    server = BlockingRpcServer(SERVICE)
    async with grpc.aio.insecure_channel(server.start("127.0.0.1:0")) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()
        async with asyncio.timeout(10):
            while True:  # their threads end
                try:
                    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 2
                except grpc.aio.AioRpcError:
                    continue
                break
    server.stop(0)


@pytest.mark.parametrize(("kind", "module"), [(RpcServer, "server"), (BlockingRpcServer, "blocking")])
async def test_watchers_of_health_are_bounded_and_who_asks_once_is_answered(kind, module, monkeypatch):
    monkeypatch.setattr(f"services.common.rpc.{module}._MOST_WATCHERS", 2)
    server = kind(SERVICE)
    async with grpc.aio.insecure_channel(await done(server.start("127.0.0.1:0"))) as channel:
        stub, anything = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        watches = [stub.Watch(anything), stub.Watch(health_pb2.HealthCheckRequest(service="nobody's"))]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(anything).read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, errors.Overloaded)
        assert error.reason == "TOO_MANY_WATCHERS"
        assert "2 streams" in error.message
        assert (await stub.Check(anything)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await done(server.set_ready(True))
        assert (await watches[0].read()).status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()
        async with asyncio.timeout(10):
            while True:  # its place is free when the server has heard of it
                try:
                    assert (await stub.Watch(anything).read()).status == health_pb2.HealthCheckResponse.SERVING
                except grpc.aio.AioRpcError:
                    continue
                break
    await done(server.stop(0))


def test_the_probe_says_why_a_server_does_not_answer(tmp_path):
    assert probe(f"unix:{tmp_path}/nobody").startswith("UNAVAILABLE")


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("m", field="f"),
        errors.PayloadTooLarge("m", field="f"),
        errors.NotFound("m", field="model"),
        errors.AlreadyExists("m"),
        errors.FailedPrecondition("m"),
        errors.Overloaded("m", retry_after_s=2.25),
        errors.Unavailable("m"),
        errors.DeadlineExceeded("m"),
        errors.Internal("m"),
    ],
)
def test_an_error_survives_the_wire(error):
    back = from_status(to_status(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error) | {"reason": error.reason}
