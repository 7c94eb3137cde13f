"""A task that counts how often the event loop runs it, beside the work of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """The number of turns so far."""

    count = 0


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Turns]:
    """Count the turns of another task while the context is open."""
    turns = Turns()

    async def others() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    try:
        yield turns
    finally:
        task.cancel()
