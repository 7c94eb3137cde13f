"""What every gRPC server of ours does: health, reflection, and errors as statuses with details."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from services.common import errors
from services.common.rpc.probe import probe
from services.common.rpc.server import RpcServer
from services.common.rpc.status import from_rpc_error, from_status, to_status
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

SERVICE = "tokasaurus.scheduler.v1.SchedulerService"


class Servicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Raises whatever the test put into ``error``."""

    error: Exception

    async def GetLoad(self, request, context):
        raise self.error

    async def WatchPlans(self, request, context):
        yield observe_pb2.WatchPlansResponse(step=1)
        raise self.error


@pytest.fixture
async def serving():
    servicer, server = Servicer(), RpcServer(SERVICE)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server.grpc_server)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield servicer, server, channel
    await server.stop(0)


async def test_health_follows_readiness(serving):
    _, server, channel = serving
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == 2
    await server.set_ready(True)
    for name in ("", SERVICE):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == 1


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


async def test_two_servers_cannot_share_a_port():
    first, second = RpcServer(SERVICE), RpcServer(SERVICE)
    address = await first.start("127.0.0.1:0")
    with pytest.raises(errors.Unavailable, match="choose a free address"):
        await second.start(address)
    await first.stop(0)


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
