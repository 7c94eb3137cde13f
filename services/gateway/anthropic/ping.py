"""``ping`` events in idle streams, so that proxies and clients do not time out."""

import asyncio
from collections.abc import AsyncIterator

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
PING_SECONDS = 10.0


async def with_pings(events: AsyncIterator[bytes], seconds: float = PING_SECONDS) -> AsyncIterator[bytes]:
    """Yield ``events``, and a ping after each ``seconds`` without an event."""
    pending: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            pending = asyncio.create_task(_next(events))
            while not (await asyncio.wait([pending], timeout=seconds))[0]:
                yield PING
            if (data := pending.result()) is None:
                return
            yield data
    finally:
        if pending is not None:
            pending.cancel()


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)
