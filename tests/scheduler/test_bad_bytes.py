"""Bytes at a scheduler's port that no gRPC client sends."""

import asyncio

import pytest
from grpc._cython import cygrpc

from services.common.config import SchedulerConfig
from services.common.errors import Internal
from services.common.rpc import acceptor
from services.scheduler.server import SchedulerServer
from tests.common.rpc.http2 import call
from tests.fakes.worker import FakeWorker
from tests.scheduler.service import PROMPT, start

NOT_UTF8 = b"/tokasaurus.scheduler.v1.SchedulerService/\xff"


async def test_a_method_name_that_is_not_utf8_disturbs_no_call():
    async with start() as service:
        await call(service.server.address, NOT_UTF8)
        samples = await service.generate(tokens={"token_ids": PROMPT}, stopping={"max_tokens": 5})
        assert len(samples[0].tokens) == 5


async def test_a_scheduler_whose_server_accepts_no_calls_ends(monkeypatch):
    """An orchestrator starts it again."""
    monkeypatch.setattr(acceptor._Acceptor, "_make_request_call_future", cygrpc.AioServer._make_request_call_future)
    worker = FakeWorker()
    config = SchedulerConfig(worker_addresses=(await worker.start(),), scheduler_listen="127.0.0.1:0")
    server = SchedulerServer(config)
    await call(await server.start(), NOT_UTF8)
    with pytest.raises(Internal, match="accepts no calls"):
        async with asyncio.timeout(60):
            await server.wait(asyncio.Event())
    await server.stop()
    await worker.stop()
