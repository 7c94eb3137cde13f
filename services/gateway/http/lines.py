"""What lines of batches take of their keys' limits: the room that requests of the same key leave."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.common.errors import Overloaded, TokaError
from services.common.keys import Key
from services.common.limits import Reservation
from services.gateway.http.guard import Guard

# Lines of a key that have begun and have no tokens yet.
MAX_UNFUNDED = 8
_LOOK_S = 1.0  # how late a line that waits sees tokens that came back, and keys that changed

R = TypeVar("R")


class Displaced(Exception):
    """A request of the same key needed the line's place: it is to begin anew."""


class Lines:
    """Of a gateway. Lives on its event loop."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.unfunded: Counter[str] = Counter()  # lines, by the name of their key
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # who gets tokens next, by the same

    def begin_now(self, name: str) -> "Line | None":
        """A line of the key ``name``; None: it has to wait."""
        line = Line(self, name)
        return line if line.begin() else None

    async def begin(self, name: str) -> "Line":
        """A line of the key ``name``, once there is room for it."""
        while (line := self.begin_now(name)) is None:
            await self.guard.limits.wait_for_capacity(name, _LOOK_S)
        return line


class Line:
    """One that runs. Whoever began it calls ``hold``, or ``end``."""

    def __init__(self, lines: Lines, name: str) -> None:
        self.refusal: TokaError | None = None  # its key may ask nothing any more
        self._lines, self._name = lines, name
        self._key: Key | None = None  # None: nobody counts
        self._task: asyncio.Task[Any] | None = None  # that runs it
        self._displaced = False
        self._unfunded = False
        self._wanted = 0  # tokens that it could not have yet
        self._held: Reservation | None = None  # tokens that it waited for
        self._spent: Reservation | None = None  # those of its last try

    def begin(self) -> bool:
        """Whether there is room for it."""
        lines = self._lines
        try:
            self._key = lines.guard.key_named(self._name)
        except TokaError as error:
            self.refusal = error
            return True
        if self._key is None:
            return True
        counted = self._key.tokens_per_minute is not None
        if counted and lines.unfunded[self._name] >= MAX_UNFUNDED:
            return False
        if not lines.guard.limits.start_background(self._key, self._give_way):
            return False
        self._unfunded = counted
        lines.unfunded[self._name] += counted
        return True

    async def hold(self, work: Callable[[], Awaitable[R]]) -> R:
        """The result of ``work()``, which runs in the calling task. Raises ``Displaced``. It has ended then."""
        self._task = task = asyncio.current_task()
        assert task is not None  # this is a coroutine
        try:
            if self._displaced:
                raise Displaced
            return await work()
        except asyncio.CancelledError:
            if self._displaced and not task.uncancel():
                if self._spent is not None:  # it pays for the try that ends well
                    self._spent.settle(0)
                raise Displaced from None
            raise
        finally:
            self.end()

    def end(self) -> None:
        """It counts no more. May be called again."""
        self._task = None
        if self._held is not None:
            self._held.settle(0)
            self._held = None
        self._is_funded()
        if self._key is not None:
            self._lines.guard.limits.end_background(self._key, self._give_way)
            self._key = None

    def reserve(self, tokens: int) -> Reservation | None:
        """``tokens`` for its request; None: nobody counts. Raises ``Overloaded`` when it has to ``wait_for_tokens``
        first, and ``InvalidRequest`` when there never will be so many."""
        held, self._held = self._held, None
        if held is not None and held.tokens < tokens:
            held.settle(0)
            held = None
        if held is None and self._key is not None and self._key.tokens_per_minute is not None:
            limits = self._lines.guard.limits
            if (late_s := limits.seconds_until_spare(self._key, tokens)) or self._lines.turns[self._name].locked():
                self._wanted = tokens
                raise Overloaded("the line waits for its API key's tokens", retry_after_s=late_s)
            held = limits.reserve(self._key, tokens)
        self._is_funded()
        self._spent = held
        return held

    @property
    def wants_tokens(self) -> bool:
        """It could not ``reserve`` them, and has not waited since."""
        return self._wanted > 0

    async def wait_for_tokens(self) -> None:
        """Until it has those that it could not ``reserve``. Raises what is wrong with its key."""
        wanted, self._wanted = self._wanted, 0
        guard = self._lines.guard
        async with self._lines.turns[self._name]:
            while True:
                self._key = key = guard.key_named(self._name)  # which may have other limits by now
                if key is None or key.tokens_per_minute is None:
                    return
                if not (late_s := guard.limits.seconds_until_spare(key, wanted)):
                    self._held = guard.limits.reserve(key, wanted)
                    return
                await asyncio.sleep(min(late_s, _LOOK_S))

    def _give_way(self) -> None:
        self._displaced = True
        if self._task is not None:
            self._task.cancel()

    def _is_funded(self) -> None:
        if self._unfunded:
            self._unfunded = False
            self._lines.unfunded[self._name] -= 1
            self._lines.guard.limits.notify_capacity(self._name)
