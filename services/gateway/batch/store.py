"""The database: opened, its schema made or brought up to date, and its transactions."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, CursorResult, Table, UpdateBase, event, insert, inspect, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InvalidRequestError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from services.common.errors import FailedPrecondition, InvalidRequest, Unavailable
from services.gateway.batch.tables import (
    COMPLETED,
    Base,
    Chunk,
    SchemaVersion,
    StoredBatch,
    StoredChat,
    StoredConversation,
    StoredEvents,
    StoredFile,
    StoredItem,
    StoredResponse,
    StoredTry,
)

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_LOCK_WAIT_S = 30  # of SQLite, which has one writer at a time
# By driver, seconds: to connect, and for one statement. Whoever waits may then wait as long again for the connection to
# be given up.
_PATIENCE = {"asyncpg": {"timeout": 10.0, "command_timeout": 60.0}}
_STATEMENTS = 32  # kept prepared by each connection: those of lists are as many as lists are long, 10 KB each
# SQL states of what may go well the next time: lost connections, deadlocks, a full or stopping server.
_PASSING = ("08", "40", "53", "57")
_MIGRATION_LOCK = 0x746F6B61  # PostgreSQL's advisory locks have numbers


def _version_1(connection: Connection) -> None:
    Base.metadata.create_all(connection)


def _version_2(connection: Connection) -> None:
    StoredResponse.__table__.create(connection, checkfirst=True)  # a store that is new has it


def _version_3(connection: Connection) -> None:
    StoredTry.__table__.create(connection, checkfirst=True)
    for table in (StoredFile.__table__, StoredResponse.__table__, StoredBatch.__table__):
        _add_column(connection, table, "key_name", "''")
        for index in table.indexes:
            if "key_name" in index.columns:  # others may be of columns that a later version adds
                index.create(connection, checkfirst=True)


def _version_4(connection: Connection) -> None:
    for table in (StoredBatch.__table__, Chunk.__table__):
        _add_column(connection, table, "reasoning_tokens", "0")


def _version_5(connection: Connection) -> None:
    for table in (StoredEvents, StoredConversation, StoredItem, StoredChat):
        table.__table__.create(connection, checkfirst=True)
    responses = StoredResponse.__table__
    _add_column(connection, responses, "status", f"'{COMPLETED}'")
    _add_column(connection, responses, "owner", None)
    _add_column(connection, responses, "lease_until", None)
    for index in responses.indexes:
        index.create(connection, checkfirst=True)


def _add_column(connection: Connection, table: Table, name: str, default: str | None) -> None:
    """Add a column that is never NULL, or with ``default`` None one that may be, unless a new store has it already."""
    if name not in {column["name"] for column in inspect(connection).get_columns(table.name)}:
        kind = table.c[name].type.compile(connection.dialect)
        rest = "" if default is None else f" DEFAULT {default} NOT NULL"
        connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {name} {kind}{rest}"))


# Each brings the schema from the version before to its own; the n-th makes version n. Append only.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_version_1, _version_2, _version_3, _version_4, _version_5)


class Store:
    """Made by ``open``; used on the gateway's event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        # SQLite has one writer at a time, and a second one polls for its turn. In this process they queue instead.
        self._turn = asyncio.Lock() if engine.dialect.name == "sqlite" else None
        self._read = async_sessionmaker(engine, expire_on_commit=False)
        self._write = async_sessionmaker(engine.execution_options(toka_writes=True), expire_on_commit=False)

    @classmethod
    async def open(cls, url: str) -> "Store":
        """The database at ``url``, with its tables. Several processes may do so at once.

        Raises ``Unavailable`` for a database that does not answer, other ``TokaError`` for one that never will.
        """
        engine = _make_engine(url)
        store = cls(engine)
        try:
            async with _translated(), engine.execution_options(toka_writes=True).begin() as connection:
                await connection.run_sync(_migrate)
        except BaseException:
            await store.close()
            raise
        return store

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads."""
        async with _translated(), self._read() as session:
            yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A transaction that is committed at its end, if nothing was raised."""
        async with _translated(), self._writer(), self._write.begin() as session:
            yield session

    @asynccontextmanager
    async def _writer(self) -> AsyncIterator[None]:
        if self._turn is None:
            yield
            return
        async with asyncio.timeout(_LOCK_WAIT_S):
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    async def close(self) -> None:
        """Let the connections go."""
        await self._engine.dispose()


async def rows_changed(session: AsyncSession, statement: UpdateBase) -> int:
    """How many rows ``statement`` changed."""
    result = await session.execute(statement)
    return cast("CursorResult[Any]", result).rowcount  # which one of an update or a delete is


def _make_engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
        parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
        if parsed.get_backend_name() != "sqlite":
            patience = _PATIENCE.get(parsed.get_driver_name(), {})
            given = parsed.query  # what the operator says counts
            parsed = parsed.difference_update_query([*patience.keys() & given.keys()])
            own = {name: float(str(given.get(name, seconds))) for name, seconds in patience.items()}
            return create_async_engine(parsed, pool_pre_ping=True, connect_args=own)
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        arguments = {"timeout": _LOCK_WAIT_S, "cached_statements": _STATEMENTS}
        engine = create_async_engine(parsed, connect_args=arguments)
    except (ArgumentError, InvalidRequestError, NoSuchModuleError, ImportError, ValueError) as error:
        raise InvalidRequest(
            f"flag store_url={url.partition(':')[0]}...: {error}; expected an SQLAlchemy URL with an asynchronous"
            " driver that is installed, such as sqlite:///PATH or postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE",
            field="store_url",
        ) from error
    except OSError as error:
        raise Unavailable(f"cannot make the directory of the database: {error}") from error
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    # A process that dies loses nothing; when the power goes, the last commits may be undone: their lines run again.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=OFF", "cache_size=-4000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """Who will write takes the lock at once: SQLite lets nobody write who has read what has changed since."""
    writes = connection.get_execution_options().get("toka_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
    Base.metadata.create_all(connection, tables=[SchemaVersion.__table__])
    version = connection.execute(select(SchemaVersion.version)).scalar()
    if version is None:
        connection.execute(insert(SchemaVersion).values(id=1, version=0))
        version = 0
    if version > len(MIGRATIONS):
        raise FailedPrecondition(
            f"the store has schema version {version}, and this program knows {len(MIGRATIONS)}: a newer one made it;"
            " run that, or name another store with store_url="
        )
    for migrate in MIGRATIONS[version:]:
        migrate(connection)
    connection.execute(update(SchemaVersion).values(version=len(MIGRATIONS)))


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """What the database has to say, as an error of ours."""
    try:
        yield
    except (PoolTimeout, TimeoutError, OSError, sqlite3.OperationalError) as error:
        raise Unavailable(f"the store does not answer: {str(error) or 'it takes too long'}") from error
    except DBAPIError as error:
        again = str(getattr(error.orig, "sqlstate", "")).startswith(_PASSING)
        if again or error.connection_invalidated or isinstance(error, (InterfaceError, OperationalError)):
            raise Unavailable(f"the store does not answer: {error.orig}") from error
        raise
