"""Time slices of tasks that occupy the event loop for long."""

import asyncio
import time

SLICE_S = 0.005  # a task runs this long before other tasks run


class TimeSlice:
    """Time slice on the event loop of one task, or of several tasks that share it.

    A long task checks ``is_over`` regularly and calls ``renew`` if it is.
    """

    def __init__(self) -> None:
        self._began_at = time.perf_counter()
        self._renewal = asyncio.Lock()  # tasks that share the slice continue one after the other

    @property
    def is_over(self) -> bool:
        """True if the slice has lasted ``SLICE_S``."""
        return time.perf_counter() - self._began_at >= SLICE_S

    async def renew(self) -> None:
        """Let the other tasks of the event loop run, then start a new slice."""
        async with self._renewal:
            if self.is_over:
                await asyncio.sleep(0)
                self._began_at = time.perf_counter()
