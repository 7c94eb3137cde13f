"""Ends the calls of clients that do not read their responses."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import structlog

from services.common.errors import Overloaded
from services.common.rpc.interceptor import AnyContext, abort

log = structlog.get_logger(__name__)

_CHECKS = 8  # within the timeout; a suspended process loses at most one of them

_Response = TypeVar("_Response")


class SendTimeout:
    """Timeout of writes, for all calls that return streams. Used on the event loop."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` is the time for which a client may read nothing."""
        self.seconds = seconds
        self.ending: set[asyncio.Task[None]] = set()  # calls whose status waits for unread responses

    async def monitor(
        self, responses: AsyncGenerator[_Response, None], context: AnyContext
    ) -> AsyncGenerator[_Response, None]:
        """Yield ``responses`` and monitor their writes.

        Must run in the call's task. Closes ``responses`` at the end.
        """
        write = _Write(self, context)
        try:
            async for response in responses:
                write.writing, write.checks = True, 0
                yield response
                write.writing = False
        finally:
            write.timer.cancel()
            await responses.aclose()


class _Write:
    """State of the current write of a call. gRPC requests the next response when the client has made room."""

    def __init__(self, send_timeout: SendTimeout, context: AnyContext) -> None:
        self._send_timeout, self._context = send_timeout, context
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self.writing = False
        self.checks = 0  # of the current write
        self._check()

    def _check(self) -> None:
        self.checks += self.writing
        if self.checks <= _CHECKS:
            self.timer = self._loop.call_later(self._send_timeout.seconds / _CHECKS, self._check)
            return
        ending = asyncio.create_task(self._give_up())
        self._send_timeout.ending.add(ending)
        ending.add_done_callback(self._send_timeout.ending.discard)

    async def _give_up(self) -> None:
        """Cancel the call's task, which is blocked in a write, and set the status of the call.

        The call's resources are freed. The client receives the status if it continues to read.
        """
        seconds, task = self._send_timeout.seconds, self._task
        log.warning("a client does not read: its call was ended", peer=self._context.peer(), seconds=seconds)
        error = Overloaded(
            f"the client read nothing for {seconds:g} s; read faster, or request less at once",
            retry_after_s=1.0,
            reason="SLOW_READER",
        )
        if task is not None:
            self._loop.call_soon(task.cancel)  # after ``abort`` has started
        with contextlib.suppress(Exception):  # it always raises: the call is aborted, or the client has gone
            await abort(self._context, error, "")
