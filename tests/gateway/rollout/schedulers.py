"""Schedulers with fake workers, and the fleets of several gateways, in the process of a test."""

import asyncio
from contextlib import asynccontextmanager

from services.common.config import SchedulerConfig
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.session import Timings
from services.scheduler.server import SchedulerServer
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import eventually_async


class Schedulers:
    """``workers[i]`` is the worker of ``servers[i]``, which listens at ``addresses[i]``."""

    def __init__(self, count: int) -> None:
        self.workers = [FakeWorker(FakeShape(max_slots=64)) for _ in range(count)]
        self.servers: list[SchedulerServer | None] = []
        self.addresses: list[str] = []
        self.fleets: list[Fleet] = []

    @classmethod
    @asynccontextmanager
    async def running(cls, count: int = 2, gateways: int = 1):
        """Run ``count`` schedulers and ``gateways`` fleets, which are ready."""
        schedulers = cls(count)
        try:
            for worker in schedulers.workers:
                await worker.start()
                schedulers.servers.append(None)
                schedulers.addresses.append("127.0.0.1:0")
            for index in range(count):
                await schedulers.start(index)
            for _ in range(gateways):
                await schedulers.add_gateway()
            yield schedulers
            assert not any(worker.violations for worker in schedulers.workers)
        finally:
            for fleet in schedulers.fleets:
                await fleet.stop()
            for index in range(count):
                await schedulers.stop(index)
            for worker in schedulers.workers:
                await worker.stop()

    async def start(self, index: int) -> None:
        """Start a scheduler at the address of a scheduler that was stopped before."""
        config = SchedulerConfig(
            worker_addresses=(self.workers[index].address,), scheduler_listen=self.addresses[index]
        )
        server = SchedulerServer(config)
        self.addresses[index], self.servers[index] = await server.start(), server

    async def stop(self, index: int) -> None:
        server, self.servers[index] = self.servers[index], None
        if server is not None:
            await server.stop()

    async def add_gateway(self) -> Fleet:
        """Start the fleet of another gateway, and wait until its schedulers are ready."""
        fleet = Fleet(
            self.addresses,
            tokenizer_fingerprint=Tokenizer.load("builtin").fingerprint,
            metrics=RequestMetrics(),
            timings=Timings(),
            turn=0,
        )
        fleet.start()
        self.fleets.append(fleet)
        await self.until_ready(fleet)
        return fleet

    async def until_ready(self, fleet: Fleet) -> None:
        await eventually_async(lambda: all(replica.ready for replica in fleet.replicas))

    def is_paused(self, index: int) -> bool:
        return self.servers[index].engine.ask(lambda core: core.state.queue.pause is not None).result(60)

    async def until_paused(self, index: int) -> None:
        await eventually_async(lambda: self.is_paused(index))

    @property
    def versions(self) -> list[str]:
        """The versions of the workers' weights."""
        return [worker.weights.version for worker in self.workers]

    def running_at(self) -> int:
        """Return the number of the scheduler that has unfinished requests."""
        [index] = [
            index
            for index, server in enumerate(self.servers)
            if server is not None and server.engine.ask(lambda core: len(core.state.queue.requests)).result(60)
        ]
        return index


async def cancelled(task: asyncio.Task) -> None:
    """Cancel ``task``, and wait for its end."""
    task.cancel()
    await asyncio.wait([task])
