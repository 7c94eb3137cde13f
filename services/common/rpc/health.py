"""grpc.health.v1 with a limit on watches. Any client may watch without a key, and each watch is an open stream."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2

from services.common.errors import Overloaded


class WatchedHealth(health.aio.HealthServicer):
    """Health service of an asyncio server. Used on its event loop."""

    def __init__(self, most_watchers: int) -> None:
        super().__init__()
        self._most_watchers = most_watchers
        self._watchers = 0

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> None:
        if self._watchers >= self._most_watchers:
            raise _refusal(self._most_watchers)
        self._watchers += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watchers -= 1


class BlockingWatchedHealth(health.HealthServicer):
    """Health service of a blocking server. Any thread may call, and each watch occupies a thread."""

    def __init__(self, most_watchers: int) -> None:
        # In non-blocking mode, reporting a change could deadlock with a watcher.
        super().__init__(experimental_non_blocking=False)
        self._most_watchers = most_watchers
        self._watchers = 0
        self._counting = threading.Lock()

    def Watch(  # type: ignore[override]  # the base class has overloads
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.ServicerContext,
        send_response_callback: Callable[..., Any] | None = None,
    ) -> Iterator[health_pb2.HealthCheckResponse] | None:
        with self._counting:
            if self._watchers >= self._most_watchers:
                raise _refusal(self._most_watchers)
            self._watchers += 1
        if not context.add_callback(self._leave):  # the call has already ended
            self._leave()
            return iter(())
        return super().Watch(request, context, send_response_callback)

    def _leave(self) -> None:
        with self._counting:
            self._watchers -= 1


def _refusal(most: int) -> Overloaded:
    return Overloaded(
        f"{most} streams watch the health of this server, which is its limit: use Check, or watch later",
        retry_after_s=1.0,
        reason="TOO_MANY_WATCHERS",
    )
