"""SQLite's threads, when tasks are cancelled during a statement."""

import asyncio
import threading

import pytest
from sqlalchemy import text

from services.gateway.store.database import Store

TIMEOUT_S = 60


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_store_closes_after_the_statement_of_a_cancelled_task(tmp_path, cancellations):
    store = await Store.open(f"sqlite:///{tmp_path}/x.db")
    running, release, ended = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def hold() -> int:
        loop.call_soon_threadsafe(running.set)
        ended.append(release.wait(TIMEOUT_S))
        return 1

    async def read() -> None:
        async with store.reading() as session:
            pooled = await (await session.connection()).get_raw_connection()
            await pooled.driver_connection.create_function("hold", 0, hold)
            await session.execute(text("SELECT hold()"))

    others = asyncio.all_tasks()
    reading = asyncio.create_task(read())
    await running.wait()
    for _ in range(cancellations):  # the second one arrives while the first one closes the connection
        reading.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    assert not ended
    closing = asyncio.create_task(store.close())
    release.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(reading, return_exceptions=True)
        await closing
        assert ended
        # SQLAlchemy closes cancelled connections in tasks of its own. They must end, too.
        await asyncio.gather(*asyncio.all_tasks() - others)
