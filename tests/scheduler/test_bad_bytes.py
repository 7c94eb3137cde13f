"""Bytes at a scheduler's port that no gRPC client sends."""

import asyncio

import grpc
import pytest
from grpc._cython import cygrpc

from services.common.config import SchedulerConfig
from services.common.errors import Internal
from services.common.rpc import acceptor
from services.common.rpc.status import from_rpc_error
from services.scheduler.server import SchedulerServer
from tests.common.rpc.http2 import call
from tests.scheduler.service import PROMPT, session, start
from tokasaurus.scheduler.v1 import session_pb2

NOT_UTF8 = b"/tokasaurus.scheduler.v1.SchedulerService/\xff"


async def test_a_method_name_that_is_not_utf8_disturbs_no_call():
    async with start() as service:
        await call(service.server.address, NOT_UTF8)
        samples = await service.generate(tokens={"token_ids": PROMPT}, stopping={"max_tokens": 5})
        assert len(samples[0].tokens) == 5


async def test_a_scheduler_whose_server_accepts_no_calls_ends(monkeypatch):
    """An orchestrator starts it again."""
    monkeypatch.setattr(acceptor.GrpcAcceptor, "_make_request_call_future", cygrpc.AioServer._make_request_call_future)
    config = SchedulerConfig(worker_addresses=("127.0.0.1:1",), scheduler_listen="127.0.0.1:0")  # no worker is there
    server = SchedulerServer(config)
    await call(await server.start(), NOT_UTF8)
    with pytest.raises(Internal, match="no longer accepts calls"):
        async with asyncio.timeout(60):
            await server.wait(asyncio.Event())
    await server.stop()


@pytest.mark.parametrize("counted", [0, 2])
async def test_a_session_counts_its_messages(counted):
    """The second heartbeat is the third message: `open` and the first heartbeat are before it."""
    async with start() as service, session(service) as client:
        await client.send(heartbeat=session_pb2.Heartbeat(nonce=1))
        await client.send(heartbeat=session_pb2.Heartbeat(nonce=2, messages_before=counted))
        received, answered = 1, 0  # `opened`
        while answered != 2:
            message = await client.read()
            if message.HasField("heartbeat"):
                assert message.heartbeat.messages_before == received
                answered = message.heartbeat.nonce
            received += 1


async def test_a_session_whose_messages_were_lost_ends():
    async with start() as service, session(service) as client:
        await client.send(heartbeat=session_pb2.Heartbeat(nonce=1, messages_before=2))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.until(lambda message: False)
        assert from_rpc_error(raised.value).reason == "MESSAGES_LOST"
