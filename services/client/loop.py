"""An event loop in a thread of its own, for callers that have none, or one that runs."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

_CLOSED = "this LLM is closed, or was made in another process; make one here"


class LoopThread:
    """Everything of a client that waits runs here. The thread does not keep its process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        # Of ``_closed``, and what is submitted: nothing is behind the end. Reentrant, since a garbage collection may
        # submit while its thread does.
        self._lock = threading.RLock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokasaurus", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of ``work``, for a caller in any other thread. It is cancelled when the caller is interrupted.

        Raises ``RuntimeError`` once ``stop`` was called, also for what runs then.
        """
        future = self._submit(work)
        if future is None:
            raise RuntimeError(_CLOSED)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._closed:
                raise RuntimeError(_CLOSED) from None
            raise
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Have ``work`` done, for a caller in any thread, this one included."""
        self._submit(work)

    def _submit(self, work: Coroutine[Any, Any, R]) -> "concurrent.futures.Future[R] | None":
        if self.running:  # a fork has a copy of the lock, which nobody may ever let go
            with self._lock:
                if not self._closed:
                    return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        return None

    @property
    def running(self) -> bool:
        """In this process: a fork has no thread."""
        return os.getpid() == self._pid and self._thread.is_alive()

    @property
    def here(self) -> bool:
        """Whether the caller is the thread itself, as a garbage collection may be."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread, and what still runs in it."""
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
