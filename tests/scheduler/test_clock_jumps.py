"""The host's wall clock is set while requests run."""

import asyncio
import time

import pytest

from tests.scheduler.service import PROMPT, start
from tokasaurus.scheduler.v1 import generate_pb2 as g

TIMEOUT_S = 60.0
TOKENS = g.TokenPrompt(token_ids=PROMPT)
HOUR_S = 3600


@pytest.fixture
def set_clock(monkeypatch):
    """Sets the wall clock forward or back."""
    seconds, nanoseconds = time.time, time.time_ns

    def move(by_s):
        monkeypatch.setattr(time, "time", lambda: seconds() + by_s)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + by_s * 10**9)

    return move


@pytest.mark.parametrize("clock", ["deadline_in_ms", "deadline_unix_ms", "of the call"])
async def test_a_clock_that_is_set_forward_ends_no_request(clock, set_clock):
    deadline = {"deadline_in_ms": HOUR_S * 1000, "deadline_unix_ms": int((time.time() + HOUR_S) * 1000)}
    fields = {clock: deadline[clock]} if clock in deadline else {}
    async with start() as service:
        service.worker.hold()
        request = g.GenerateRequest(tokens=TOKENS, stopping=g.Stopping(max_tokens=4), **fields)
        call = service.stub.Generate(request, timeout=None if fields else HOUR_S)
        answers = aiter(call)
        assert (await anext(answers)).HasField("accepted")
        set_clock(2 * HOUR_S)
        service.worker.release()
        reasons = [sample.finish.reason async for answer in answers for sample in answer.outputs.samples]
        assert reasons[-1] == g.FINISH_REASON_LENGTH


async def test_a_clock_that_is_set_back_does_not_move_a_deadline(set_clock):
    async with start() as service:
        service.worker.hold()
        call = service.stub.Generate(g.GenerateRequest(tokens=TOKENS, deadline_in_ms=500))
        answers = aiter(call)
        assert (await anext(answers)).HasField("accepted")
        set_clock(-HOUR_S)
        async with asyncio.timeout(TIMEOUT_S):
            reasons = [sample.finish.reason async for answer in answers for sample in answer.outputs.samples]
        assert reasons == [g.FINISH_REASON_DEADLINE]
        service.worker.release()
