"""``ping`` events in streams that have nothing to send, so that proxies and clients do not take them for dead."""

import asyncio
from collections.abc import AsyncIterator

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
PING_SECONDS = 10.0


async def with_pings(events: AsyncIterator[bytes], seconds: float = PING_SECONDS) -> AsyncIterator[bytes]:
    """Yield ``events``, and a ping whenever none came for ``seconds``."""
    coming: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            coming = asyncio.create_task(_next(events))
            while not (await asyncio.wait([coming], timeout=seconds))[0]:
                yield PING
            if (data := coming.result()) is None:
                return
            yield data
    finally:
        if coming is not None:
            coming.cancel()


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)
