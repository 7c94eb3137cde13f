"""Rate limits of Batch job lines. They may only use what requests of the same key leave."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.common.errors import Overloaded, TokaError
from services.common.keys import Key
from services.common.limits import Reservation
from services.gateway.http.guard import Guard

# Maximum of a key's lines that have started and have not reserved their tokens.
MAX_UNFUNDED = 8
_POLL_S = 1.0  # interval in which a waiting line checks for returned tokens and changed keys

R = TypeVar("R")


class Displaced(Exception):
    """The line was cancelled in favour of a request of the same key, and has to be run again."""


class Lines:
    """The Batch job lines of a gateway. Used on its event loop."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.unfunded: Counter[str] = Counter()  # number of lines by key name
        # By key name. Held by the line that gets tokens next.
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def begin_now(self, name: str) -> "Line | None":
        """Start a line of the key ``name``. Return None if it has to wait."""
        line = Line(self, name)
        return line if line.begin() else None

    async def begin(self, name: str) -> "Line":
        """Wait for room within the key's limits, and start a line of the key ``name``."""
        while (line := self.begin_now(name)) is None:
            await self.guard.limits.wait_for_capacity(name, _POLL_S)
        return line


class Line:
    """A running line. The caller that started it calls ``hold`` or ``end``."""

    def __init__(self, lines: Lines, name: str) -> None:
        self.refusal: TokaError | None = None  # the key is no longer allowed
        self._lines, self._name = lines, name
        self._key: Key | None = None  # None: no limits apply
        self._task: asyncio.Task[Any] | None = None  # the task that runs the line
        self._displaced = False
        self._unfunded = False
        self._wanted = 0  # tokens for which the budget was too small
        self._waited_for: Reservation | None = None  # reserved by ``wait_for_tokens``
        self._spent: Reservation | None = None  # reserved for the last attempt

    def begin(self) -> bool:
        """Start the line if its key's limits allow it. Return whether they do."""
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
        if not lines.guard.limits.start_background(self._key, self._displace):
            return False
        self._unfunded = counted
        lines.unfunded[self._name] += counted
        return True

    async def hold(self, work: Callable[[], Awaitable[R]]) -> R:
        """Run ``work()`` in the calling task and end the line. Raises ``Displaced`` if a request needed its place."""
        self._task = task = asyncio.current_task()
        assert task is not None  # this is a coroutine
        try:
            if self._displaced:
                raise Displaced
            return await work()
        except asyncio.CancelledError:
            if self._displaced and not task.uncancel():
                if self._spent is not None:  # only the attempt that completes is charged
                    self._spent.settle(0)
                raise Displaced from None
            raise
        finally:
            self.end()

    def end(self) -> None:
        """Release the line's limits. Further calls do nothing."""
        self._task = None
        if self._waited_for is not None:
            self._waited_for.settle(0)
            self._waited_for = None
        self._set_funded()
        if self._key is not None:
            self._lines.guard.limits.end_background(self._key, self._displace)
            self._key = None

    def reserve(self, tokens: int) -> Reservation | None:
        """Reserve ``tokens`` for the line's request. Return None if no limit applies.

        Raises ``Overloaded`` if the line has to ``wait_for_tokens`` first, and ``InvalidRequest`` if the number exceeds
        the key's limit.
        """
        reserved, self._waited_for = self._waited_for, None
        if reserved is not None and reserved.tokens < tokens:
            reserved.settle(0)
            reserved = None
        if reserved is None and self._key is not None and self._key.tokens_per_minute is not None:
            limits = self._lines.guard.limits
            if (wait_s := limits.seconds_until_spare(self._key, tokens)) or self._lines.turns[self._name].locked():
                self._wanted = tokens
                raise Overloaded("the line waits for its API key's tokens", retry_after_s=wait_s)
            reserved = limits.reserve(self._key, tokens)
        self._set_funded()
        self._spent = reserved
        return reserved

    @property
    def wants_tokens(self) -> bool:
        """True if ``reserve`` failed and the line has not waited since."""
        return self._wanted > 0

    async def wait_for_tokens(self) -> None:
        """Wait until the tokens that ``reserve`` lacked are reserved. Raises if the key is no longer allowed."""
        wanted, self._wanted = self._wanted, 0
        guard = self._lines.guard
        async with self._lines.turns[self._name]:
            while True:
                self._key = key = guard.key_named(self._name)  # its limits may have changed
                if key is None or key.tokens_per_minute is None:
                    return
                if not (wait_s := guard.limits.seconds_until_spare(key, wanted)):
                    self._waited_for = guard.limits.reserve(key, wanted)
                    return
                await asyncio.sleep(min(wait_s, _POLL_S))

    def _displace(self) -> None:
        self._displaced = True
        if self._task is not None:
            self._task.cancel()

    def _set_funded(self) -> None:
        if self._unfunded:
            self._unfunded = False
            self._lines.unfunded[self._name] -= 1
            self._lines.guard.limits.notify_capacity(self._name)
