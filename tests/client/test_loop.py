"""The thread that an LLM's work runs in, and its end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.client.loop import LoopThread
from tests.gateway.deployment import PATIENCE_S


def test_what_runs_at_the_end_is_told_that_it_is_over():
    loop, begun = LoopThread(), threading.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor() as threads:
        caller = threads.submit(loop.run, forever())
        assert begun.wait(PATIENCE_S)
        loop.stop()
        with pytest.raises(RuntimeError, match="closed"):
            caller.result(PATIENCE_S)
    loop.stop()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(forever())
    loop.begin(forever())


def test_what_comes_while_it_ends_is_refused():
    loop, begun, ending, asked = LoopThread(), threading.Event(), threading.Event(), threading.Event()
    told: list[BaseException] = []
    never = asyncio.Event()  # held here: a task that only it knows would be garbage

    async def slow_to_end() -> None:
        begun.set()
        try:
            await never.wait()
        finally:
            ending.set()
            await asyncio.to_thread(asked.wait, PATIENCE_S)

    def ask_late() -> None:
        try:
            loop.run(asyncio.Event().wait())
        except BaseException as error:
            told.append(error)
        asked.set()

    loop.begin(slow_to_end())
    assert begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=loop.stop, daemon=True)
    stopping.start()
    assert ending.wait(PATIENCE_S)
    late = threading.Thread(target=ask_late, daemon=True)
    late.start()
    late.join(PATIENCE_S)
    assert not late.is_alive(), "nobody will ever answer it"
    stopping.join(PATIENCE_S)
    assert [type(error) for error in told] == [RuntimeError]
