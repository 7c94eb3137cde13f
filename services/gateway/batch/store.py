"""The database: opened, its schema made or brought up to date, and its transactions."""

import asyncio
import os
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

from services.common.errors import FailedPrecondition, InvalidRequest, StoreUnavailable
from services.gateway.batch.health import StoreHealth, diagnose
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


def _version_6(connection: Connection) -> None:
    for table in (StoredFile.__table__, StoredChat.__table__, StoredBatch.__table__):
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _add_column(connection: Connection, table: Table, name: str, default: str | None) -> None:
    """Add a column that is never NULL, or with ``default`` None one that may be, unless a new store has it already."""
    if name not in {column["name"] for column in inspect(connection).get_columns(table.name)}:
        kind = table.c[name].type.compile(connection.dialect)
        rest = "" if default is None else f" DEFAULT {default} NOT NULL"
        connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {name} {kind}{rest}"))


# Each brings the schema from the version before to its own; the n-th makes version n. Append only.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    _version_1,
    _version_2,
    _version_3,
    _version_4,
    _version_5,
    _version_6,
)


class Store:
    """Made by ``open``; used on the gateway's event loop."""

    def __init__(self, engine: AsyncEngine, health: StoreHealth) -> None:
        self._engine = engine
        self._health = health
        self._path = _path_of(engine)
        self._file: tuple[int, int] | None = None  # identity of the file at ``_path``, once it is open
        self._reopening = asyncio.Lock()
        # SQLite has one writer at a time, and a second one polls for its turn. In this process they queue instead.
        self._turn = asyncio.Lock() if engine.dialect.name == "sqlite" else None
        self._read = async_sessionmaker(engine, expire_on_commit=False)
        self._write = async_sessionmaker(engine.execution_options(toka_writes=True), expire_on_commit=False)

    @classmethod
    async def open(cls, url: str, health: StoreHealth | None = None) -> "Store":
        """Open the database at ``url`` and bring its tables up to date. Several processes may do so at once.

        Raises ``StoreUnavailable`` for a database that cannot be used now, other ``TokaError`` for one that never can.
        """
        health = health or StoreHealth()
        engine = _make_engine(url, health)
        store = cls(engine, health)
        try:
            await store._migrate()
        except BaseException:
            await store.close()
            raise
        return store

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads. Raises ``StoreUnavailable``."""
        async with self._watched(writing=False):
            await self._follow_file()
            async with self._read() as session:
                yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A transaction that is committed at its end, if nothing was raised. Raises ``StoreUnavailable``."""
        async with self._watched(writing=True):
            await self._follow_file()
            async with self._writer(), self._write.begin() as session:
                yield session

    async def _migrate(self) -> None:
        async with self._watched(writing=True):
            async with self._engine.execution_options(toka_writes=True).begin() as connection:
                opened = _identity(self._path)
                try:
                    await connection.run_sync(_migrate)
                except FailedPrecondition as error:
                    self._health.failed("database", "newer", error.message, writing=True)
                    raise
            self._file = opened

    async def _follow_file(self) -> None:
        """Open SQLite's database again if its file was replaced. Raises ``StoreUnavailable`` if the file is gone.

        SQLite itself would go on with the file that was deleted, or make an empty one.
        """
        if self._path is None or (self._file is not None and _identity(self._path) == self._file):
            return
        self._file = None  # the next file may get the number of this one
        await self._engine.dispose()
        if _identity(self._path) is None:
            raise self._health.failed(
                "database",
                "missing",
                f"the database {self._path} is gone; put it back, or start the gateway again with an empty store",
                writing=False,
            )
        async with self._reopening:
            if self._file is None:
                try:
                    await self._migrate()
                except FailedPrecondition as error:
                    raise StoreUnavailable(error.message) from error
                self._health.replaced()

    @asynccontextmanager
    async def _watched(self, *, writing: bool) -> AsyncIterator[None]:
        """Raise what the database says as ``StoreUnavailable``, if it may go well another time or with an operator's
        help, and tell the health."""
        try:
            yield
        except (PoolTimeout, TimeoutError, OSError, sqlite3.Error, DBAPIError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            found = None if self._path is None or cause is None else diagnose(cause, self._path)
            if found is None and not _may_pass(error):
                raise
            problem, message = found or ("error", f"the store does not answer: {str(cause) or 'it takes too long'}")
            if problem == "damaged":
                await self._engine.dispose()  # the next connections open the file that replaces it
            raise self._health.failed("database", problem, message, writing=writing) from error
        self._health.worked("database", writing=writing)

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


def _make_engine(url: str, health: StoreHealth | None = None) -> AsyncEngine:
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
        arguments = {name: value for name, value in arguments.items() if name not in parsed.query}
        engine = create_async_engine(parsed, connect_args=arguments)
    except (ArgumentError, InvalidRequestError, NoSuchModuleError, ImportError, ValueError) as error:
        raise InvalidRequest(
            f"flag store_url={url.partition(':')[0]}...: {error}; expected an SQLAlchemy URL with an asynchronous"
            " driver that is installed, such as sqlite:///PATH or postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE",
            field="store_url",
        ) from error
    except OSError as error:
        message = (
            f"the directory of the database cannot be made ({error}); make it, or name another one with store_dir="
        )
        raise (health or StoreHealth()).failed("database", "missing", message, writing=True) from error
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
            f"the store has schema version {version}, and this program knows {len(MIGRATIONS)}: a newer program made"
            f" {connection.engine.url.database}; run that, or name another store with store_url="
        )
    for migrate in MIGRATIONS[version:]:
        migrate(connection)
    connection.execute(update(SchemaVersion).values(version=len(MIGRATIONS)))


def _may_pass(error: Exception) -> bool:
    """Return whether the same statement may succeed another time."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (PoolTimeout, OSError, sqlite3.OperationalError))
    passing = str(getattr(error.orig, "sqlstate", "")).startswith(_PASSING)
    return passing or error.connection_invalidated or isinstance(error, (InterfaceError, OperationalError))


def _path_of(engine: AsyncEngine) -> str | None:
    """Return the path of SQLite's database, or None for one in memory and for other databases."""
    name = engine.url.database or ""
    if engine.dialect.name != "sqlite" or not name or name == ":memory:":
        return None
    return name.removeprefix("file:").partition("?")[0] if name.startswith("file:") else name


def _identity(path: str | None) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if it is not there."""
    try:
        found = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)
