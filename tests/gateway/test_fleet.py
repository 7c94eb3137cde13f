"""The tasks that keep a fleet going."""

import asyncio

import numpy as np
import pytest

from bench.server import free_port
from services.common.config import GatewayConfig
from services.common.errors import Internal, Unavailable
from services.common.process.service import Stop
from services.gateway.__main__ import serve
from services.gateway.engine.failover import Failover
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.replica import Replica
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.session import Timings
from tests.gateway.turns import counting_turns


@pytest.fixture
def breaks(monkeypatch) -> asyncio.Event:
    """When set, the task that sends again what was lost ends in a way that nobody foresaw."""
    now = asyncio.Event()

    async def run(self) -> None:
        await now.wait()
        raise ValueError("unforeseen")

    monkeypatch.setattr(Failover, "run", run)
    return now


async def test_when_one_of_its_tasks_ends_requests_do_not_wait_for_ever(breaks):
    fleet = Fleet([f"127.0.0.1:{free_port()}"], tokenizer_fingerprint="0", metrics=RequestMetrics(), timings=Timings())
    fleet.start()
    try:
        job = PromptRequest("r", "m", np.array([1], np.uint32), 5, None, Settings())
        running = await fleet.generate([job], streaming=False)
        breaks.set()
        async with asyncio.timeout(60):
            with pytest.raises(Internal, match="has ended"):
                await fleet.watch_tasks()
            with pytest.raises(Unavailable, match="cannot go on"):
                await running.wait_ended()
    finally:
        await fleet.stop()


async def test_a_gateway_that_cannot_go_on_ends(breaks, tmp_path):
    config = GatewayConfig(port=free_port(), scheduler_addresses=(f"127.0.0.1:{free_port()}",), store_dir=str(tmp_path))
    async with asyncio.timeout(60):
        with pytest.raises(Internal, match="has ended"):
            await serve(config, Stop(), on_listening=lambda _: breaks.set())


async def test_a_connection_that_is_not_begun_again_ends_it_too(monkeypatch):
    """However it ends: a call that is cut off may look like one that was cancelled."""

    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Replica, "run", cancelled)
    fleet = Fleet(["127.0.0.1:1"], tokenizer_fingerprint="0", metrics=RequestMetrics(), timings=Timings())
    fleet.start()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(Internal, match="has ended"):
                await fleet.watch_tasks()
    finally:
        await fleet.stop()


async def test_a_request_without_a_scheduler_is_told_what_is_wrong_with_each():
    timings = Timings(wait_for_ready=0.0, failover=0.0)
    fleet = Fleet(["127.0.0.1:1"], tokenizer_fingerprint="0", metrics=RequestMetrics(), timings=timings)
    assert "127.0.0.1:1" in fleet.trouble
    with pytest.raises(Unavailable) as refused:
        await fleet.model(None)
    assert refused.value.message == f"no scheduler is ready: {fleet.trouble}"


async def test_other_tasks_run_while_many_prompts_of_one_request_are_sent(monkeypatch):
    monkeypatch.setattr("services.common.process.time_slice.SLICE_S", 0.0)
    fleet = Fleet([f"127.0.0.1:{free_port()}"], tokenizer_fingerprint="0", metrics=RequestMetrics(), timings=Timings())
    fleet.start()
    try:
        jobs = [PromptRequest(f"r-{n}", "m", np.array([1], np.uint32), 5, None, Settings()) for n in range(1000)]
        async with counting_turns() as turns:
            (await fleet.generate(jobs, streaming=False)).close()
        assert turns.count >= len(jobs)
    finally:
        await fleet.stop()


async def test_no_more_prompts_of_a_request_are_sent_once_one_of_them_has_failed(monkeypatch):
    monkeypatch.setattr("services.common.process.time_slice.SLICE_S", 0.0)
    sent = []

    def enqueue(self, call, error) -> None:
        sent.append(call)
        call.parent.fail(Unavailable("the first one failed"))

    monkeypatch.setattr(Failover, "enqueue", enqueue)
    fleet = Fleet([f"127.0.0.1:{free_port()}"], tokenizer_fingerprint="0", metrics=RequestMetrics(), timings=Timings())
    fleet.start()
    try:
        jobs = [PromptRequest(f"r-{n}", "m", np.array([1], np.uint32), 5, None, Settings()) for n in range(1000)]
        with pytest.raises(Unavailable, match="the first one failed"):
            await fleet.generate(jobs, streaming=False)
        assert len(sent) == 1
    finally:
        await fleet.stop()
