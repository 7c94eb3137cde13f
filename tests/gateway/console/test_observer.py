"""The observer's calls, when the connection to the scheduler ends under them."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import orjson
import pytest

from services.gateway.console.observer import Observer
from services.gateway.console.plan_watch import PlanWatch
from tests.gateway.access.http_server import until
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Does not answer what is asked about its load; tells one plan to each watcher."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.watchers = 0
        self.left = asyncio.Event()

    async def GetLoad(self, request, context):
        self.asked.set()
        await asyncio.Event().wait()

    async def WatchPlans(self, request, context):
        self.watchers += 1
        try:
            yield observe_pb2.WatchPlansResponse(step=7)
            await asyncio.Event().wait()
        finally:
            self.left.set()


class Replica:
    """What the observer sees of one."""

    address, scheduler_id, model, ready, trouble = "it", "", None, True, ""

    def __init__(self, stub) -> None:
        self.stub = stub

    def metadata(self):
        return ()


@asynccontextmanager
async def connected():
    """A scheduler, the channel to it, and what the observer sees of its replica."""
    server, scheduler = grpc.aio.server(), Scheduler()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        yield scheduler, channel, Replica(stub)
    await server.stop(None)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_viewers_are_told_of_a_connection_that_is_closed(when):
    async with asyncio.timeout(20), connected() as (scheduler, channel, replica):
        observer = Observer(SimpleNamespace(replicas=(replica,), trouble="", draining=False))
        if when == "before":
            await channel.close()
        viewer = asyncio.create_task(observer.state())
        if when == "meanwhile":
            await scheduler.asked.wait()
            await channel.close()
        (told,) = orjson.loads(await viewer)["replicas"]
        assert told["load"] is None
        assert "connection" in told["trouble"]


@pytest.mark.parametrize("gone", ["no stub", "closed"])
async def test_plans_are_watched_again_behind_a_connection_that_was_lost_at_once(gone):
    async with asyncio.timeout(20), connected() as (_, channel, replica), connected() as (_, _, again):
        watch = PlanWatch(replica)
        if gone == "closed":
            await channel.close()
        watch.latest()
        if gone == "no stub":  # before the watch has begun
            replica.stub = None
            await asyncio.sleep(0)
        await until(lambda: watch.latest() is None)
        replica.stub = again.stub
        await until(lambda: (plan := watch.latest()) is not None and plan.step == 7)


@pytest.mark.slow
async def test_a_watch_ends_when_nobody_looks_any_more(monkeypatch):
    async with asyncio.timeout(20), connected() as (scheduler, _, replica):
        watch = PlanWatch(replica)
        await until(lambda: watch.latest() is not None)
        monkeypatch.setattr("services.gateway.console.plan_watch._IDLE_TIMEOUT_S", 0.0)
        await scheduler.left.wait()
        assert scheduler.watchers == 1
