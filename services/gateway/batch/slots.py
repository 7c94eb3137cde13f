"""Slots for the lines that one gateway runs at once, shared between fairness keys."""

import asyncio
from collections import Counter, deque

_RESERVED_FOR = 4  # keys without a running line that the reserved slots should suffice for, in equal parts


class LineSlots:
    """The slots of one gateway, on its event loop.

    A free slot goes to the waiting key with the fewest running lines, and among equals to the key that has waited
    longest. Of one key, the line that waits longest goes first. The last ``reserved`` slots go only to keys that run
    few lines, so that a key whose lines run for minutes leaves room for others.
    """

    def __init__(self, count: int, reserved: int = 0) -> None:
        self.free = count
        self._reserved = reserved
        self._few = max(1, reserved // _RESERVED_FOR)
        self._running: Counter[str] = Counter()  # lines with a slot, by key
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by key, the one served last at the end

    async def take(self, key: str) -> None:
        """Wait for a slot for a line of ``key``."""
        if key not in self._waiting and self._may_take(key):
            self._grant(key)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(key)
            else:
                self._leave(key, granted)
            raise

    def give_back(self, key: str) -> None:
        """Return a slot that a line of ``key`` has taken."""
        self.free += 1
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        while (served := self._next()) is not None:
            granted = self._waiting[served].popleft()
            self._leave(served)
            self._grant(served)
            granted.set_result(None)

    def _next(self) -> str | None:
        able = [key for key in self._waiting if self._may_take(key)]
        return min(able, key=self._running.__getitem__) if able else None

    def _may_take(self, key: str) -> bool:
        return self.free > self._reserved or (self.free > 0 and self._running[key] < self._few)

    def _grant(self, key: str) -> None:
        self.free -= 1
        self._running[key] += 1

    def _leave(self, key: str, granted: asyncio.Future[None] | None = None) -> None:
        """Remove ``granted`` from the waiting lines, and move the key after the other keys."""
        waiting = self._waiting.pop(key)
        if granted is not None:
            waiting.remove(granted)
        if waiting:
            self._waiting[key] = waiting


class Slot:
    """The slot of one line of ``key``, which the line may give back and take again."""

    def __init__(self, slots: LineSlots, key: str) -> None:
        self._slots = slots
        self._key = key
        self._taken = False

    async def take(self) -> None:
        """Wait for a slot, unless the line has one."""
        if not self._taken:
            await self._slots.take(self._key)
            self._taken = True

    def give_back(self) -> None:
        """Return the slot, if the line has one."""
        if self._taken:
            self._taken = False
            self._slots.give_back(self._key)
