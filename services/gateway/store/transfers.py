"""Uploads and downloads of files at once. Each holds a file open for as long as its client takes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from services.common.errors import Overloaded, TokaError, Unavailable
from services.common.host.descriptors import reserve_of

_KEY_SHARE = 4  # one key has at most one of so many
_WAIT_S = 10.0
_RETRY_S = 1.0


def most_transfers(limit: int) -> int:
    """Return how many transfers may run at once where ``limit`` files may be open. They use half of the reserve."""
    return reserve_of(limit) // 2


class Transfers:
    """Counts transfers, of each API key and together. Lives on the event loop."""

    def __init__(self, most: int, wait_s: float = _WAIT_S) -> None:
        """Allow ``most`` at once. One more waits for ``wait_s`` seconds."""
        self._most, self._most_of_key, self._wait_s = most, max(1, most // _KEY_SHARE), wait_s
        self._all = asyncio.Semaphore(most)
        self._of_keys: dict[str, asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def running(self, owner: str) -> AsyncIterator[None]:
        """Count a transfer of the key ``owner``, empty where there are no keys. Waits while there are too many.

        Raises ``Overloaded`` if the key's share stays in use, and ``Unavailable`` if all transfers do.
        """
        async with contextlib.AsyncExitStack() as held:
            if owner:
                share = self._of_keys.setdefault(owner, asyncio.Semaphore(self._most_of_key))
                await self._acquire(share, held, self._key_is_busy)
            await self._acquire(self._all, held, self._all_are_busy)
            yield

    async def _acquire(
        self, semaphore: asyncio.Semaphore, held: contextlib.AsyncExitStack, refusal: Callable[[], TokaError]
    ) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await held.enter_async_context(semaphore)
        except TimeoutError:
            raise refusal() from None

    def _key_is_busy(self) -> TokaError:
        return Overloaded(
            f"{self._most_of_key} uploads and downloads of this API key run already, its share; try again later",
            retry_after_s=_RETRY_S,
            reason="RATE_LIMIT_EXCEEDED",
        )

    def _all_are_busy(self) -> TokaError:
        return Unavailable(
            f"{self._most} uploads and downloads of files run already; try again later", reason="TOO_MANY_TRANSFERS"
        )
