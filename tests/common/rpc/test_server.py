"""A server survives bytes that no gRPC client sends."""

import asyncio

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc import acceptor
from services.common.rpc.blocking import BlockingRpcServer
from services.common.rpc.server import RpcServer
from services.common.rpc.status import from_rpc_error
from tests.common.rpc.http2 import call

NOT_UTF8 = b"/grpc.health.v1.Health/\xff\xfe"
PATHS = (NOT_UTF8, b"", b"/", b"/nowhere/Method", b"/\0", b"\xff", "/héalth/Check".encode())


async def health(address: str) -> int:
    """Return the overall health, on a new connection."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest()
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)).status


async def done(value):
    return await value if asyncio.iscoroutine(value) else value


@pytest.mark.parametrize("kind", [RpcServer, BlockingRpcServer])
async def test_a_server_answers_after_calls_of_methods_that_are_no_names(kind):
    server = kind("x.y.Service")
    address = await done(server.start("127.0.0.1:0"))
    for path in PATHS:
        await call(address, path)
    await call(address, b"/grpc.health.v1.Health/Check", authorization=b"Bearer \xff", cookie=b"\0\xff")
    assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
    await done(server.stop(0))


async def test_a_method_that_is_not_registered_is_unimplemented():
    server = RpcServer("x.y.Service")
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        whole = channel.unary_unary("/x.y.Service/Missing")(b"", timeout=20)
        assert await whole.code() is grpc.StatusCode.UNIMPLEMENTED
        stream = channel.stream_stream("/x.y.Service/Missing")(timeout=20)  # without a message to the server
        assert await stream.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


@pytest.mark.parametrize("error", [cygrpc.ExecuteBatchError("the client is gone"), ValueError("a defect")], ids=str)
async def test_only_answers_to_clients_that_are_gone_fail_without_a_log_line(caplog, error):
    async def fail(request, context):
        raise error

    server = acceptor.accepting_server((), ())
    server.add_registered_method_handlers("x.Service", {"Call": grpc.unary_unary_rpc_method_handler(fail)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/x.Service/Call")(b"", timeout=1)
    await server.stop(0)
    assert [record.exc_info[1] for record in caplog.records] == ([error] if isinstance(error, ValueError) else [])


async def test_a_server_whose_serving_loop_ended_says_so(monkeypatch):
    monkeypatch.setattr(
        acceptor.GrpcAcceptor, "_make_request_call_future", cygrpc.AioServer._make_request_call_future
    )  # grpcio's own, which decodes every path
    server = RpcServer("x.y.Service")
    address = await server.start("127.0.0.1:0")
    await server.check()
    await call(address, NOT_UTF8)
    with pytest.raises(UnicodeDecodeError):
        await until_it_ends(server)
    await server.stop(0)


async def until_it_ends(server: RpcServer) -> None:
    async with asyncio.timeout(20):
        while True:
            await server.check()
            await asyncio.sleep(0.01)


async def test_details_that_cannot_be_read_leave_code_and_message():
    async def fail(request, context):
        await context.abort(grpc.StatusCode.ABORTED, "why", (("grpc-status-details-bin", b"\xff\xff"),))

    server = RpcServer("x.y.Service")
    handlers = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
    server.grpc_server.add_registered_method_handlers("x.y.Service", handlers)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/x.y.Service/Fail")(b"", timeout=20)
    assert from_rpc_error(raised.value).message == "why"
    await server.stop(0)
