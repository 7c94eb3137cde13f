"""An event loop in its own thread, for callers with and without an event loop."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.common.boundaries import undo_on_error

R = TypeVar("R")

_CLOSED = "this LLM is closed, or was made in another process; make one here"


class LoopThread:
    """The thread of a client's event loop. It does not keep its process running."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        # Held while work is submitted and while ``_closed`` is set, so that no work is submitted after the end. It is
        # reentrant, because a garbage collection may submit work in a thread that submits work.
        self._lock = threading.RLock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokasaurus", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run ``work`` and return its result, for a caller in another thread. An interrupt of the caller cancels it.

        Raises ``RuntimeError`` if ``stop`` was called before ``work`` has ended.
        """
        future = self._submit(work)
        if future is None:
            raise RuntimeError(_CLOSED)
        try:
            with undo_on_error(future.cancel):
                return future.result()
        except concurrent.futures.CancelledError:
            if self._closed:
                raise RuntimeError(_CLOSED) from None
            raise

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start ``work`` without waiting for it, for a caller in any thread, this one included."""
        self._submit(work)

    def _submit(self, work: Coroutine[Any, Any, R]) -> "concurrent.futures.Future[R] | None":
        if self.running:  # a forked process has a copy of the lock, which may stay locked
            with self._lock:
                if not self._closed:
                    return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        return None

    @property
    def running(self) -> bool:
        """True if the thread runs in this process. A forked process has a copy without the thread."""
        return os.getpid() == self._pid and self._thread.is_alive()

    @property
    def here(self) -> bool:
        """True if the caller runs in this thread, as a garbage collection may."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Cancel the work that still runs, and end the thread."""
        if not self.running:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
