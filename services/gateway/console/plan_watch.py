"""The last plan of a scheduler, for as long as somebody wants to know it."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import grpc

from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

if TYPE_CHECKING:
    from tokasaurus.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_WANTED_S = 10.0  # without a question the watch ends
_LOOK_S = 1.0


class PlanWatch:
    """Owned by the observer; on the gateway's event loop. Begins with the first question, and ends by itself when there
    are no more, or the scheduler ends it; the next question begins it again."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._plan: observe_pb2.WatchPlansResponse | None = None
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def latest(self) -> observe_pb2.WatchPlansResponse | None:
        """The plan sent last, as far as it was watched."""
        self._asked_at = time.monotonic()
        if self._task is None and (stub := self._replica.stub) is not None:
            self._task = asyncio.create_task(self._watch(stub))
        return self._plan

    async def _watch(self, stub: "SchedulerServiceAsyncStub") -> None:
        reading = asyncio.create_task(self._read(stub))
        try:
            while not reading.done() and time.monotonic() - self._asked_at < _WANTED_S:
                await asyncio.wait((reading,), timeout=_LOOK_S)
        finally:
            reading.cancel()
            self._task, self._plan = None, None

    async def _read(self, stub: "SchedulerServiceAsyncStub") -> None:
        # Why a scheduler does not tell its plans, the observer's other questions show.
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):  # the latter: its channel is closed
            call = stub.WatchPlans(observe_pb2.WatchPlansRequest(), metadata=self._replica.metadata())
            try:
                async for plan in call:
                    self._plan = plan
            finally:
                call.cancel()
