"""An event loop in a thread of its own, for callers that have none, or one that runs."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class LoopThread:
    """Everything of a client that waits runs here. The thread does not keep its process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokasaurus", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of ``work``, for a caller in any other thread. It is cancelled when the caller is interrupted."""
        if not self.running:
            work.close()
            raise RuntimeError("this LLM is closed, or was made in another process; make one here")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Have ``work`` done, for a caller in any thread, this one included."""
        if self.running:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            work.close()

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
        if self.running:
            self.run(self._cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
