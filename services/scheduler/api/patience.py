"""Ends the calls of clients that take nothing of what they are sent."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import structlog

from services.common.errors import Overloaded
from services.common.rpc.interceptor import AnyContext, abort

log = structlog.get_logger(__name__)

_LOOKS = 8  # within its patience: time in which this process stood still counts as one

_Response = TypeVar("_Response")


class Patience:
    """Lives on the asyncio loop, for all calls that answer with streams."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: a client may take nothing for so long."""
        self.seconds = seconds
        self.ending: set[asyncio.Task[None]] = set()  # whose status waits behind what is not taken

    async def sending(
        self, responses: AsyncGenerator[_Response, None], context: AnyContext
    ) -> AsyncGenerator[_Response, None]:
        """``responses``, from the call's own task; they are closed when it ends."""
        write = _Write(self, context)
        try:
            async for response in responses:
                write.begin()
                yield response
                write.end()
        finally:
            write.close()
            await responses.aclose()


class _Write:
    """What a call sends now: gRPC has taken it when it asks for more, and waits until the client makes room."""

    def __init__(self, patience: Patience, context: AnyContext) -> None:
        self._patience, self._context = patience, context
        self._task = asyncio.current_task()
        self._writing = False
        self._looks = 0  # at the same message
        self._wait()

    def begin(self) -> None:
        self._writing, self._looks = True, 0

    def end(self) -> None:
        self._writing = False

    def close(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._patience.seconds / _LOOKS, self._look)

    def _look(self) -> None:
        self._looks += self._writing
        if self._looks <= _LOOKS:
            self._wait()
            return
        ending = asyncio.create_task(self._give_up())
        self._patience.ending.add(ending)
        ending.add_done_callback(self._patience.ending.discard)

    async def _give_up(self) -> None:
        """The call's task is stuck in a write, and is cancelled: all that the call holds is let go. Its status comes
        behind what was written, should the client ever read on."""
        seconds, task = self._patience.seconds, self._task
        log.warning("a client does not read: its call is ended", peer=self._context.peer(), seconds=seconds)
        error = Overloaded(
            f"nothing of the answer was taken for {seconds:g} s; read faster, or ask for less at once",
            retry_after_s=1.0,
            reason="SLOW_READER",
        )
        if task is not None:
            asyncio.get_running_loop().call_soon(task.cancel)  # behind the first half of the next line
        with contextlib.suppress(Exception):  # it always raises: that it aborted, or that the client is gone
            await abort(self._context, error, "")
