"""The database of the store: schema, migrations and transactions."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import Connection, insert, inspect, select, text, update
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.schema import CreateColumn

from services.common.boundaries import undo_on_error_async
from services.common.errors import FailedPrecondition, StoreUnavailable
from services.gateway.store.engines import LOCK_TIMEOUT_S, make_engine
from services.gateway.store.health import StoreHealth, diagnose
from services.gateway.store.sqlite import SqliteConnections
from services.gateway.store.tables import Base, SchemaVersion

# Version of the schema in ``tables``. Raise it with each change there. So far, every change has only added tables,
# columns with defaults, and indexes, which ``_add_missing`` does from any older version.
SCHEMA_VERSION = 6
# SQL states of transient errors: lost connections, deadlocks, a full or stopping server.
_TRANSIENT = ("08", "40", "53", "57")
MIGRATION_LOCK = 0x746F6B61  # number of the advisory lock of PostgreSQL that a migration holds


class Store:
    """An open database, created by ``open``. All methods run on the gateway's event loop."""

    def __init__(self, url: str, health: StoreHealth) -> None:
        self._url = url
        self._health = health
        self._sqlite = SqliteConnections()
        self._engine = make_engine(url, health, self._sqlite)
        self._path = _path_of(self._engine)
        self._file: tuple[int, int] | None = None  # identity of the file at ``_path``, once it is open
        self._reopening = asyncio.Lock()
        # SQLite has one writer at a time, and a second one polls. Writers of this process wait for this lock instead.
        self._writer_lock = asyncio.Lock() if self._engine.dialect.name == "sqlite" else None
        self._read = async_sessionmaker(self._engine, expire_on_commit=False)
        self._write = async_sessionmaker(self._engine.execution_options(toka_writes=True), expire_on_commit=False)

    @classmethod
    async def open(cls, url: str, health: StoreHealth | None = None) -> "Store":
        """Open the database at ``url`` and migrate its schema. Several processes may do so at once.

        Raises StoreUnavailable for a transient error, and other TokaErrors for a database that cannot be used.
        """
        store = cls(url, health or StoreHealth())
        async with undo_on_error_async(store.close):
            await store._migrate()
        return store

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Run a transaction that only reads. Raises StoreUnavailable."""
        async with self._watched(writing=False):
            await self._follow_file()
            async with self._read() as session:
                yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Run a transaction that is committed unless the block raises. Raises StoreUnavailable."""
        async with self._watched(writing=True):
            await self._follow_file()
            async with self._writer(), self._write.begin() as session:
                yield session

    async def _migrate(self) -> None:
        """Migrate the schema, if it is older than this program. Raises StoreUnavailable and FailedPrecondition."""
        async with self._watched(writing=True):
            if self._engine.dialect.name == "sqlite":
                await self._migrate_with(self._engine)
            elif not await self._is_current():
                # A broken link must not block a store that needs no migration for the timeout of a migration.
                engine = make_engine(self._url, self._health, migrating=True)
                try:
                    await self._migrate_with(engine)
                finally:
                    await engine.dispose()

    async def _is_current(self) -> bool:
        async with self._engine.begin() as connection:
            return await connection.run_sync(_is_current)

    async def _migrate_with(self, engine: AsyncEngine) -> None:
        async with engine.execution_options(toka_writes=True).begin() as connection:
            opened = _identity(self._path)
            try:
                await connection.run_sync(_migrate)
            except FailedPrecondition as error:
                self._health.record_problem("database", "newer", error.message, writing=True)
                raise
        self._file = opened

    async def _follow_file(self) -> None:
        """Open SQLite's database again if its file was replaced. Raises StoreUnavailable if the file is gone.

        SQLite itself would use the deleted file, or create an empty one.
        """
        if self._path is None or (self._file is not None and _identity(self._path) == self._file):
            return
        self._file = None  # the next file may have the same inode
        await self._engine.dispose()
        if _identity(self._path) is None:
            raise self._health.record_problem(
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
                self._health.record_replacement()

    @asynccontextmanager
    async def _watched(self, *, writing: bool) -> AsyncIterator[None]:
        """Raise an error of the database as StoreUnavailable, if it is transient or an operator can solve it.

        Records failures and successes in the health.
        """
        try:
            yield
        except (PoolTimeout, TimeoutError, OSError, sqlite3.Error, DBAPIError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            found = None if self._path is None or cause is None else diagnose(cause, self._path)
            if found is None and not _is_transient(error):
                raise
            problem, message = found or ("error", f"the store does not answer: {str(cause) or 'it takes too long'}")
            if problem == "damaged":
                await self._engine.dispose()  # the next connections open the file that replaces it
            raise self._health.record_problem("database", problem, message, writing=writing) from error
        self._health.record_success("database", writing=writing)

    @asynccontextmanager
    async def _writer(self) -> AsyncIterator[None]:
        if self._writer_lock is None:
            yield
            return
        async with asyncio.timeout(LOCK_TIMEOUT_S):
            await self._writer_lock.acquire()
        try:
            yield
        finally:
            self._writer_lock.release()

    async def close(self) -> None:
        """Close all connections, and wait for the statements of cancelled tasks."""
        await self._engine.dispose()
        await self._sqlite.stopped()


def _is_current(connection: Connection) -> bool:
    """Return whether the schema has this program's version.

    Locks the version's row, so that a read-only server fails here and not at the first write.
    """
    if not inspect(connection).has_table(SchemaVersion.__tablename__):
        return False
    return connection.execute(select(SchemaVersion.version).with_for_update(read=True)).scalar() == SCHEMA_VERSION


def _migrate(connection: Connection) -> None:
    """Bring the schema to this program's version. Raises FailedPrecondition for the schema of a newer program."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
    Base.metadata.create_all(connection, tables=[SchemaVersion.__table__])
    version = connection.execute(select(SchemaVersion.version)).scalar()
    if version is None:
        connection.execute(insert(SchemaVersion).values(id=1, version=0))
        version = 0
    if version > SCHEMA_VERSION:
        raise FailedPrecondition(
            f"the store has schema version {version}, and this program knows {SCHEMA_VERSION}: a newer program made"
            f" {connection.engine.url.database}; run that, or name another store with store_url="
        )
    if version < SCHEMA_VERSION:
        _add_missing(connection)
    # Written at each start, so that a database that is read-only fails here.
    connection.execute(update(SchemaVersion).values(version=SCHEMA_VERSION))


def _add_missing(connection: Connection) -> None:
    """Add the tables, columns and indexes that the database lacks. Existing rows get the defaults of new columns."""
    Base.metadata.create_all(connection)
    found = inspect(connection)
    for table in Base.metadata.tables.values():
        known = {column["name"] for column in found.get_columns(table.name)}
        for column in table.columns:
            if column.name not in known:
                added = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {added}"))
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _is_transient(error: Exception) -> bool:
    """Return whether the same statement may succeed if it is repeated."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (PoolTimeout, OSError, sqlite3.OperationalError))
    transient = str(getattr(error.orig, "sqlstate", "")).startswith(_TRANSIENT)
    return transient or error.connection_invalidated or isinstance(error, (InterfaceError, OperationalError))


def _path_of(engine: AsyncEngine) -> str | None:
    """Return the path of a SQLite database, or None for a database in memory or on a server."""
    name = engine.url.database or ""
    if engine.dialect.name != "sqlite" or not name or name == ":memory:":
        return None
    return name.removeprefix("file:").partition("?")[0] if name.startswith("file:") else name


def _identity(path: str | None) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if it does not exist."""
    try:
        found = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)
