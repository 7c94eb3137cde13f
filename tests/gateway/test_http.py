"""Work for a client that may leave at any moment."""

import asyncio
import contextlib

import pytest
from starlette.requests import ClientDisconnect

from services.gateway.http.request import while_connected


class Client:
    """Says that it is gone once it is."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_the_result_comes_back():
    async def work():
        await asyncio.sleep(0)
        return 5

    assert await while_connected(Client().receive, work()) == 5


async def test_an_error_comes_back():
    async def work():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await while_connected(Client().receive, work())


async def test_the_work_is_cancelled_when_the_client_leaves():
    client, cancelled = Client(), []

    async def work():
        client.gone.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ClientDisconnect):
        await while_connected(client.receive, work())
    assert cancelled
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # nothing is left that would cancel what comes after


async def test_a_client_that_leaves_with_the_result_in_sight_does_not_end_what_comes_after():
    client, ready = Client(), asyncio.get_running_loop().create_future()

    async def work():
        return await ready

    async def leave():
        client.gone.set()
        ready.set_result(5)

    leaving = asyncio.create_task(leave())
    with contextlib.suppress(ClientDisconnect):
        assert await while_connected(client.receive, work()) == 5
    await leaving
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


async def test_who_is_cancelled_from_outside_is_cancelled():
    started = asyncio.Event()

    async def work():
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(while_connected(Client().receive, work()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
