"""A client that does not read its answer: its call ends, and lets go of all that it held."""

import asyncio

import grpc
import pytest
from grpc_status import rpc_status

from services.common.rpc.status import from_status
from tests.fakes.model import FakeShape
from tests.scheduler.service import PROMPT, session, start, status_of
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

SHAPE = FakeShape(page_count=12_000)
TOKENS = g.TokenPrompt(token_ids=PROMPT)
TIMEOUT_S = 60.0
OUTPUT = g.Output(logprobs=True, top_logprobs=20)
# More than windows and buffers hold, and then the worker stands still: nothing ends by itself.
LONG, PLANS = {"tokens": TOKENS, "n": 250, "stopping": g.Stopping(max_tokens=600), "output": OUTPUT}, 200


async def test_a_call_that_is_not_read_ends():
    async with start(SHAPE, slow_client_seconds=0.2) as service:
        service.worker.hold()
        service.worker.release(plans=PLANS)
        call = service.stub.Generate(g.GenerateRequest(**LONG))
        while (await service.load()).counters.sequences_cancelled < 250:
            pass
        error = await status_of(call)  # behind what was written
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the client read nothing for 0.2 s" in error.details()
        assert from_status(rpc_status.from_call(error)).reason == "SLOW_READER"


async def test_a_session_that_is_not_read_ends():
    async with start(SHAPE, slow_client_seconds=0.2) as service, session(service) as client:
        service.worker.hold()
        service.worker.release(plans=PLANS)
        await client.submit(0, **LONG)
        while (await service.load()).counters.sequences_cancelled < 250:
            pass
        with pytest.raises(grpc.aio.AioRpcError, match="the client read nothing for"):
            await client.until(lambda message: False)


async def test_a_call_that_has_nothing_to_say_for_long_goes_on():
    async with start(slow_client_seconds=0.02) as service:
        service.worker.hold()
        call = service.stub.Generate(g.GenerateRequest(tokens=TOKENS, stopping=g.Stopping(max_tokens=2)))
        assert (await call.read()).HasField("accepted")
        await asyncio.sleep(0.1)
        service.worker.release()
        while (response := await call.read()) is not grpc.aio.EOF:
            last = response
        assert last.outputs.samples[0].finish.reason == g.FINISH_REASON_LENGTH


async def test_a_watcher_that_does_not_read_plans_ends():
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 256)]
    async with (
        start(SHAPE, slow_client_seconds=0.2) as service,
        grpc.aio.insecure_channel(service.server.address, options=window) as channel,
    ):
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchPlans(observe_pb2.WatchPlansRequest())
        async with asyncio.timeout(TIMEOUT_S):
            while not service.server.engine.watchers:  # noqa: ASYNC110 (nothing else tells)
                await asyncio.sleep(0.01)
            while service.server.engine.watchers:
                await service.generate(tokens=TOKENS, stopping=g.Stopping(max_tokens=100))
        error = await status_of(call)  # behind what was written
        assert from_status(rpc_status.from_call(error)).reason == "SLOW_READER"


async def test_watchers_of_plans_are_bounded():
    async with start(SHAPE) as service:
        calls = [service.stub.WatchPlans(observe_pb2.WatchPlansRequest()) for _ in range(64)]
        async with asyncio.timeout(TIMEOUT_S):
            while service.server.engine.watchers < 64:  # noqa: ASYNC110 (nothing else tells)
                await asyncio.sleep(0.01)
        error = await status_of(service.stub.WatchPlans(observe_pb2.WatchPlansRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_status(rpc_status.from_call(error)).reason == "TOO_MANY_WATCHERS"
        for call in calls:
            call.cancel()
