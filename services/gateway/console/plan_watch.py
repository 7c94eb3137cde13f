"""The latest plan of a scheduler, watched while it is requested."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc

from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

if TYPE_CHECKING:
    from tokasaurus.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_IDLE_TIMEOUT_S = 10.0  # the watch ends after this time without a call of ``latest``


class PlanWatch:
    """Watches the plans of one scheduler. Owned by the observer, on the gateway's event loop.

    ``latest`` starts the watch. The watch ends when ``latest`` is no longer called, or when the scheduler ends it.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._plan: observe_pb2.WatchPlansResponse | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.Timeout | None = None

    def latest(self) -> observe_pb2.WatchPlansResponse | None:
        """Return the latest plan, or None if none has arrived yet."""
        if self._task is None and (stub := self._replica.stub) is not None:
            self._task = asyncio.create_task(self._watch(stub))
        if self._idle is not None and not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S)
        return self._plan

    async def _watch(self, stub: "SchedulerServiceAsyncStub") -> None:
        # The observer's other RPCs show the error. UsageError means that the channel is closed.
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, TimeoutError):
            try:
                call = stub.WatchPlans(observe_pb2.WatchPlansRequest(), metadata=self._replica.metadata())
                try:
                    async with asyncio.timeout(_IDLE_TIMEOUT_S) as self._idle:
                        async for plan in call:
                            self._plan = plan
                finally:
                    call.cancel()
            finally:
                self._task, self._plan, self._idle = None, None, None
