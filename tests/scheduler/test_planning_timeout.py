"""Requests that nothing is computed for, while a worker is there: the scheduler does not look healthy for long."""

import asyncio

import grpc
import pytest

from services.common.config import SchedulerConfig
from services.common.errors import Internal
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.planning_timeout import PlanningTimeout
from services.scheduler.server import SchedulerServer
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tests.scheduler.core.driver import SINK, Driver
from tests.scheduler.service import PROMPT, Service
from tokasaurus.scheduler.v1 import generate_pb2

SHAPE = FakeShape(vocab_size=62, first_token=2)


class Watched:
    """A core, and what watches it, which is told what time it is."""

    def __init__(self, deadline_s: float = 30.0) -> None:
        self.driver = Driver(SHAPE)
        self.core = self.driver.core
        self.timeout = PlanningTimeout(deadline_s)
        self.now = 100.0

    def wait(self, seconds: float, *, connected: bool = True) -> None:
        """As the step loop does, where nothing happens."""
        until = self.now + seconds
        while self.now < until:
            self.timeout.check(self.core, self.now, connected=connected)
            look_s = self.timeout.until_check()
            self.now = until if look_s is None else min(until, self.now + look_s)
        self.timeout.check(self.core, self.now, connected=connected)


def test_who_waits_for_no_plan_makes_it_not_ready_and_then_fails_it():
    watched = Watched()
    watched.wait(1000)
    watched.driver.submit([5, 6, 7], max_tokens=5)
    watched.wait(14.5)
    assert watched.timeout.reason == ""
    watched.wait(1)
    assert "no plan is made" in watched.timeout.reason
    with pytest.raises(Internal, match=r"1 requests are unfinished, 1 samples wait and 0 run, .* for 30 s"):
        watched.wait(15)


def test_who_runs_and_gets_no_further_does_so_too():
    watched = Watched()
    watched.driver.submit([5, 6, 7], max_tokens=5)
    watched.driver.step()
    while watched.driver.answer():
        pass
    with pytest.raises(Internal, match="0 samples wait and 1 run"):
        watched.wait(31)


def test_a_plan_begins_it_anew():
    watched = Watched()
    watched.driver.submit([5, 6, 7], max_tokens=5)
    while watched.core.live(SINK):
        watched.wait(29)
        while watched.driver.plan():
            pass
        watched.wait(1000)  # a worker that does not answer is another matter
        assert watched.timeout.reason == ""
        while watched.driver.answer():
            pass
    watched.wait(1000)
    assert watched.timeout.reason == ""


def test_it_waits_for_a_worker_without_end():
    watched = Watched()
    watched.driver.submit([5, 6, 7], max_tokens=5)
    watched.wait(1000, connected=False)
    assert watched.timeout.reason == ""
    watched.wait(29)
    watched.wait(1, connected=False)
    watched.wait(29)


def test_a_scheduler_that_was_stopped_itself_has_not_waited():
    watched = Watched()
    watched.driver.submit([5, 6, 7], max_tokens=5)
    watched.wait(5)
    watched.now += 1000
    watched.wait(5)
    assert watched.timeout.reason == ""


def test_who_is_cancelled_waits_no_more():
    watched = Watched()
    handle = watched.driver.submit([5, 6, 7], max_tokens=5)
    watched.wait(29)
    watched.driver.cancel(handle)
    watched.wait(1000)
    assert watched.timeout.reason == ""


@pytest.mark.parametrize("planned", [0, 3])
async def test_a_scheduler_that_plans_no_more_is_not_ready_and_ends(planned, monkeypatch):
    """What its queue holds is not lost: gateways send it elsewhere, as whenever a scheduler is."""
    plan, plans = Scheduler.plan, []

    def stops(core, now_ns, *, light=False):
        if len(plans) < planned:
            plans.append(plan(core, now_ns, light=light))
            return plans[-1]
        return None

    monkeypatch.setattr(Scheduler, "plan", stops)
    worker = FakeWorker()
    config = SchedulerConfig(worker_addresses=(await worker.start(),), scheduler_listen="127.0.0.1:0", step_deadline=1)
    server = SchedulerServer(config)
    try:
        async with grpc.aio.insecure_channel(await server.start()) as channel, asyncio.timeout(60):
            service = Service([worker], server, channel)
            await service.until_health(True)
            prompt, stopping = generate_pb2.TokenPrompt(token_ids=PROMPT), generate_pb2.Stopping(max_tokens=50)
            call = service.stub.Generate(generate_pb2.GenerateRequest(tokens=prompt, stopping=stopping))
            assert (await call.read()).HasField("accepted")
            await service.until_health(False)
            with pytest.raises(Internal, match=r"the step loop failed: .*1 requests are unfinished"):
                await server.wait(asyncio.Event())
            call.cancel()
    finally:
        await server.stop()
        await worker.stop()
