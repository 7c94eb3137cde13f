"""A store whose link to PostgreSQL breaks, and migrations that take long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from bench.chaos.proxy import Proxy
from services.common.errors import NotFound, StoreUnavailable
from services.gateway.store import engines
from services.gateway.store.database import MIGRATION_LOCK, Store
from services.gateway.store.responses import Responses

DEADLINE_S = 60.0  # on a machine with other work
CONNECTIONS = 3
TIMEOUT = {"command_timeout": "1"}


@pytest.fixture
async def proxy(postgres_url) -> AsyncIterator[Proxy]:
    url = make_url(postgres_url)
    found = Proxy(f"{url.host}:{url.port or 5432}")
    yield found
    await found.stop()


@pytest.fixture
async def store(postgres_url, proxy) -> AsyncIterator[Store]:
    """A store whose connections go through ``proxy``."""
    host, port = (await proxy.start()).split(":")
    url = make_url(postgres_url).set(host=host, port=int(port)).update_query_dict(TIMEOUT)
    opened = await Store.open(url.render_as_string(hide_password=False))
    yield opened
    await opened.close()


@pytest.fixture
def failed_pings(monkeypatch) -> list[str]:
    """The messages of connections that did not reply, with a short timeout."""
    found: list[str] = []
    original = engines.InvalidatePoolError

    def record(message: str) -> Exception:
        found.append(message)
        return original(message)

    monkeypatch.setattr(engines, "PING_TIMEOUT_S", 0.5)
    monkeypatch.setattr(engines, "InvalidatePoolError", record)
    return found


async def use_connections(store: Store, count: int) -> None:
    """Read in ``count`` transactions that overlap."""
    barrier = asyncio.Barrier(count)

    async def read() -> None:
        async with store.reading() as session:
            await session.execute(text("SELECT 1"))
            await barrier.wait()

    await asyncio.gather(*(read() for _ in range(count)))


async def test_idle_connections_that_broke_are_replaced_before_a_request_uses_them(store, proxy, failed_pings):
    await use_connections(store, CONNECTIONS)
    proxy.strike("wedge")
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(CONNECTIONS):
            await Responses(store).keep({"id": "resp_1", "text": "kept"}, b"[]")
            await Responses(store).delete("resp_1")
            with pytest.raises(NotFound):
                await Responses(store).get("resp_1")


async def test_one_connection_that_does_not_reply_replaces_all_idle_ones(store, proxy, failed_pings):
    await use_connections(store, CONNECTIONS)
    proxy.strike("wedge")
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(2):
            await use_connections(store, 1)
        await use_connections(store, CONNECTIONS)
    assert len(failed_pings) == 1


async def test_a_statement_whose_result_is_lost_replaces_all_idle_connections(store, proxy, failed_pings):
    async def lose_a_result() -> None:
        async with store.writing() as session:
            await session.execute(text("SELECT 1"))
            proxy.strike("wedge")
            await session.execute(text("SELECT 1"))

    await use_connections(store, CONNECTIONS)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(StoreUnavailable, match="too long"):
            await lose_a_result()
        await use_connections(store, CONNECTIONS)
    assert failed_pings == []


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncConnection]:
    engine = engines.make_engine(url)
    async with engine.begin() as connection:
        yield connection
    await engine.dispose()


@asynccontextmanager
async def migrating(url: str) -> AsyncIterator[None]:
    """Hold the lock of migrations, as another gateway does."""
    async with connected(url) as connection:
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
        yield


async def test_a_store_with_the_current_schema_is_opened_without_the_timeout_of_a_migration(postgres_url):
    await (await Store.open(postgres_url)).close()
    async with asyncio.timeout(DEADLINE_S), migrating(postgres_url):
        await (await Store.open(postgres_url)).close()


async def test_a_migration_may_take_longer_than_other_statements(postgres_url):
    url = make_url(postgres_url).update_query_dict(TIMEOUT).render_as_string(hide_password=False)
    async with asyncio.timeout(DEADLINE_S):
        async with migrating(postgres_url):
            opening = asyncio.create_task(Store.open(url))
            await asyncio.wait([opening], timeout=2 * float(TIMEOUT["command_timeout"]))
            assert not opening.done()
        await (await opening).close()


async def test_a_server_that_takes_no_writes_is_not_opened(postgres_url):
    await (await Store.open(postgres_url)).close()
    url = make_url(postgres_url)
    async with connected(postgres_url) as connection:
        await connection.execute(text(f"ALTER DATABASE {url.database} SET default_transaction_read_only = on"))
    with pytest.raises(DBAPIError, match="read-only transaction"):
        await Store.open(postgres_url)
