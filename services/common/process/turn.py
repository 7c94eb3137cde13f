"""Fair use of an event loop by tasks that have much to do."""

import asyncio
import time

TURN_S = 0.005  # that tasks run before others have their turn


class Turn:
    """The turn on the event loop of one task, or of several that share it.

    Long work asks ``is_over`` now and then, and lets others run if it is.
    """

    def __init__(self) -> None:
        self._began_at = time.perf_counter()
        self._waiting = asyncio.Lock()  # tasks that share the turn go on one by one

    @property
    def is_over(self) -> bool:
        """Return whether the turn has lasted ``TURN_S``."""
        return time.perf_counter() - self._began_at >= TURN_S

    async def next(self) -> None:
        """Let the other tasks of the event loop run, then begin another turn."""
        async with self._waiting:
            if self.is_over:
                await asyncio.sleep(0)
                self._began_at = time.perf_counter()
