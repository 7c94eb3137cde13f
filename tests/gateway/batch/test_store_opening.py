"""A store that is opened: by many at once, and where it cannot be."""

import asyncio
import subprocess
import sys

import pytest

from services.common.errors import InvalidRequest, Unavailable
from services.gateway.batch import store as store_module
from services.gateway.batch.store import Store

OPEN = """
import asyncio, sys
from services.gateway.batch.store import Store
asyncio.run(asyncio.wait_for(Store.open(sys.argv[1]), 60))
"""


def test_many_processes_may_open_an_empty_store_at_once(store_url):
    opening = [subprocess.Popen([sys.executable, "-c", OPEN, store_url]) for _ in range(6)]
    assert [process.wait(60) for process in opening] == [0] * 6


@pytest.mark.parametrize("url", ["what", "oracle://x/y", "sqlite+pysqlite:///x.db"])
async def test_an_url_that_cannot_work_names_the_flag(url):
    with pytest.raises(InvalidRequest, match="store_url"):
        await Store.open(url)


@pytest.mark.parametrize("url", ["sqlite:////proc/none/x.db", "postgresql://a:secret@127.0.0.1:1/x"])
async def test_a_store_that_does_not_answer_may_do_so_later(url):
    with pytest.raises(Unavailable) as caught:
        await Store.open(url)
    assert "secret" not in caught.value.message


GREETING = b"R\0\0\0\x08\0\0\0\0" + b"S\0\0\0\x18server_version\x0015.0\0" + b"Z\0\0\0\x05I"


@pytest.mark.parametrize("greeting", [b"", GREETING], ids=["at once", "at a query"])
async def test_a_postgresql_that_hangs_does_not_hang_us(greeting, monkeypatch):
    """It takes connections, and may let us in, but answers no query."""
    assert store_module._PATIENCE["asyncpg"]
    monkeypatch.setitem(store_module._PATIENCE, "asyncpg", {"timeout": 1, "command_timeout": 1})

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(greeting)
        while await reader.read(4096):
            pass
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="too long"):
            await asyncio.wait_for(Store.open(f"postgresql://a:b@127.0.0.1:{port}/x?ssl=disable"), 30)


async def test_what_an_url_says_of_patience_counts(monkeypatch):
    made = []
    monkeypatch.setattr(store_module, "create_async_engine", lambda url, **more: made.append((url, more)))
    for query in ("", "?command_timeout=300&ssl=disable"):
        store_module._make_engine(f"postgresql://a:b@127.0.0.1/x{query}")
    (plain, patient) = made
    assert plain[1]["connect_args"] == {"timeout": 10, "command_timeout": 60}
    assert patient[1]["connect_args"] == {"timeout": 10, "command_timeout": 300}
    assert dict(patient[0].query) == {"ssl": "disable"}
    with pytest.raises(InvalidRequest, match="store_url"):
        store_module._make_engine("postgresql://a:b@127.0.0.1/x?timeout=soon")
