"""Opening a store: by several processes at once, and when the database cannot be used."""

import asyncio
import subprocess
import sys

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from services.common.errors import InvalidRequest, Unavailable
from services.gateway.store import engines
from services.gateway.store.database import Store

OPEN = """
import asyncio, sys
from services.gateway.store.database import Store
asyncio.run(asyncio.wait_for(Store.open(sys.argv[1]), 60))
"""


@pytest.mark.slow
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
    """The server accepts connections, and may accept the login, but answers no query.

    The timeout of migrations, 600 s, must not count before the schema's version is known.
    """
    assert engines.TIMEOUTS["asyncpg"]
    monkeypatch.setitem(engines.TIMEOUTS, "asyncpg", {"timeout": 1, "command_timeout": 1})

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


@pytest.mark.parametrize(
    ("query", "migrating", "command_timeout"),
    [("", False, 10), ("", True, 600), ("command_timeout=30", False, 30), ("command_timeout=900", True, 900)],
)
def test_timeouts_of_an_url_replace_the_default_ones(query, migrating, command_timeout, monkeypatch):
    made = {}

    def create(url, **settings):
        made.update(settings, query=dict(url.query))
        return create_async_engine(url, **settings)

    monkeypatch.setattr(engines, "create_async_engine", create)
    engines.make_engine(f"postgresql://a:b@127.0.0.1/x?ssl=disable&{query}", migrating=migrating)
    assert made["connect_args"] == {"timeout": 10, "command_timeout": command_timeout}
    assert made["query"] == {"ssl": "disable"}


def test_a_timeout_that_is_no_number_names_the_flag():
    with pytest.raises(InvalidRequest, match="store_url"):
        engines.make_engine("postgresql://a:b@127.0.0.1/x?timeout=soon")
