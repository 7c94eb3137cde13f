"""Limit of concurrent uploads and downloads of files. Each keeps a file open until its client is done."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.common.errors import Overloaded, TokaError, Unavailable
from services.common.host.descriptors import reserve_of

_KEY_DIVISOR = 4  # a key has at most the maximum divided by this number
_WAIT_S = 10.0
_RETRY_S = 1.0


def most_transfers(limit: int) -> int:
    """Return the maximum of concurrent transfers for a limit of open files: half of the reserve."""
    return reserve_of(limit) // 2


class Transfers:
    """Limits transfers, in total and per API key. Runs on the event loop."""

    def __init__(self, most: int, wait_s: float = _WAIT_S) -> None:
        """Allow ``most`` concurrent transfers. Further ones wait for at most ``wait_s`` seconds."""
        self._most, self._most_of_key, self._wait_s = most, max(1, most // _KEY_DIVISOR), wait_s
        self._all = asyncio.Semaphore(most)
        self._of_keys: dict[str, asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def running(self, owner: str) -> AsyncIterator[None]:
        """Run a transfer of the key ``owner`` (empty without authentication). Wait while there are too many.

        Raises ``Overloaded`` if the key stays at its limit, and ``Unavailable`` if the gateway does.
        """
        busy = f"{self._most} uploads and downloads of files run already; try again later"
        limits: list[tuple[asyncio.Semaphore, TokaError]] = [
            (self._all, Unavailable(busy, reason="TOO_MANY_TRANSFERS"))
        ]
        if owner:
            busy = f"{self._most_of_key} uploads and downloads of this API key run already, its share; try again later"
            share = self._of_keys.setdefault(owner, asyncio.Semaphore(self._most_of_key))
            limits.insert(0, (share, Overloaded(busy, retry_after_s=_RETRY_S, reason="RATE_LIMIT_EXCEEDED")))
        async with contextlib.AsyncExitStack() as acquired:
            for semaphore, refusal in limits:
                try:
                    async with asyncio.timeout(self._wait_s):
                        await acquired.enter_async_context(semaphore)
                except TimeoutError:
                    raise refusal from None
            yield
