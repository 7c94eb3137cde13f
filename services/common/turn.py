"""Fair use of an event loop by tasks that have much to do."""

import asyncio
import time

TURN_S = 0.005  # that a task runs before others have theirs


class Turn:
    """The turn of one task on its event loop. Long loops ask ``is_over`` now and then, and let others run if it is."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether the task has run for 5 ms."""
        return time.perf_counter() - self._began_at >= TURN_S

    async def next(self) -> None:
        """Let the other tasks of the event loop run, then begin another turn."""
        await asyncio.sleep(0)
        self._began_at = time.perf_counter()
