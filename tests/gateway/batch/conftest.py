"""Stores to test with: SQLite always, PostgreSQL where ``TOKA_TEST_POSTGRES_URL`` names one."""

import asyncio
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

POSTGRES = os.environ.get("TOKA_TEST_POSTGRES_URL", "")
needs_postgres = pytest.mark.skipif(
    not POSTGRES, reason="TOKA_TEST_POSTGRES_URL names no PostgreSQL, such as postgresql://user@host/database"
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def store_url(request, tmp_path):
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/batches.db"
        return
    with _postgres_database() as url:
        yield url


@pytest.fixture(params=[pytest.param("postgresql", marks=needs_postgres)])
def postgres_url():
    """An empty PostgreSQL database."""
    with _postgres_database() as url:
        yield url


@contextmanager
def _postgres_database() -> Iterator[str]:
    url, name = make_url(POSTGRES).set(drivername="postgresql+asyncpg"), f"toka_{uuid.uuid4().hex}"
    asyncio.run(_execute(url, f"CREATE DATABASE {name}"))
    yield url.set(database=name).render_as_string(hide_password=False)
    asyncio.run(_execute(url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(url, statement: str) -> None:
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(statement))
    await engine.dispose()
