"""Places of lines among those that one gateway runs at once."""

import asyncio


class Slot:
    """One line's. Lives on the event loop."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._taken = False

    async def take(self) -> None:
        """Wait for one. May be called again."""
        if not self._taken:
            await self._slots.acquire()
            self._taken = True

    def give_back(self) -> None:
        """May be called again."""
        if self._taken:
            self._taken = False
            self._slots.release()
