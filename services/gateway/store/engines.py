"""SQLAlchemy engines of the store: drivers, timeouts, and replacement of broken connections."""

import asyncio
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, ExceptionContext, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, InvalidRequestError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from services.common.errors import InvalidRequest
from services.gateway.store.health import StoreHealth
from services.gateway.store.sqlite import SqliteConnections

LOCK_TIMEOUT_S = 30  # SQLite has one writer at a time
# Seconds by driver, to connect and for one statement. The slowest statement took 0.1 s with 100,000 rows per table. A
# statement whose result is lost holds its connection until this timeout, so it must be less than the 15 s in which a
# gateway has to be ready after a broken link.
TIMEOUTS: dict[str, dict[str, float]] = {"asyncpg": {"timeout": 10.0, "command_timeout": 10.0}}
# Seconds for one statement of a migration: it may build an index, or wait for the migration of another gateway.
MIGRATION_TIMEOUT_S = 600.0
# Seconds for the reply to a ping of an idle connection. A timeout costs only a new connection.
PING_TIMEOUT_S = 3.0
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_STATEMENTS = 32  # prepared statements cached per connection, 10 KB each. Lists need one for each length.
_FRESH = "toka_fresh"  # marks a connection that has run no statement


def make_engine(
    url: str,
    health: StoreHealth | None = None,
    sqlite: SqliteConnections | None = None,
    *,
    migrating: bool = False,
) -> AsyncEngine:
    """Return an engine for ``url`` without connecting. Timeouts in the query of ``url`` replace the default ones.

    ``sqlite`` opens the connections if ``url`` names a SQLite database.
    ``migrating``: statements have ``MIGRATION_TIMEOUT_S``, or the timeout of the URL if that is longer.
    Raises InvalidRequest for a URL that no installed driver accepts, and StoreUnavailable if the directory of a SQLite
    database cannot be created.
    """
    try:
        parsed = make_url(url)
        parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
        if parsed.get_backend_name() == "sqlite":
            return _make_sqlite_engine(parsed, sqlite or SqliteConnections())
        return _make_server_engine(parsed, migrating=migrating)
    except (ArgumentError, InvalidRequestError, NoSuchModuleError, ImportError, ValueError) as error:
        raise InvalidRequest(
            f"flag store_url={url.partition(':')[0]}...: {error}; expected an SQLAlchemy URL with an asynchronous"
            " driver that is installed, such as sqlite:///PATH or postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE",
            field="store_url",
        ) from error
    except OSError as error:
        message = (
            f"the directory of the database cannot be created ({error}); create it, or name another one with store_dir="
        )
        raise (health or StoreHealth()).record_problem("database", "missing", message, writing=True) from error


def _make_server_engine(url: URL, *, migrating: bool) -> AsyncEngine:
    defaults, given = TIMEOUTS.get(url.get_driver_name(), {}), url.query
    timeouts = {name: float(str(given.get(name, seconds))) for name, seconds in defaults.items()}
    if migrating and timeouts:
        timeouts["command_timeout"] = max(timeouts["command_timeout"], MIGRATION_TIMEOUT_S)
    url = url.difference_update_query([*timeouts])
    engine = create_async_engine(url, pool_pre_ping=not timeouts, connect_args=timeouts)
    if timeouts:
        event.listen(engine.sync_engine, "connect", _mark_fresh)
        event.listen(engine.sync_engine, "checkout", _ping)
        event.listen(engine.sync_engine, "handle_error", _disconnect_on_timeout)
    return engine


def _mark_fresh(connection: Any, record: Any) -> None:
    record.info[_FRESH] = True


def _ping(connection: Any, record: Any, proxy: Any) -> None:
    """Replace all idle connections if this one does not reply. Links break for all connections at once.

    SQLAlchemy's own ping has the timeout of a statement, and its timeout replaces no other connection.
    """
    if record.info.pop(_FRESH, False):
        return
    try:
        connection.run_async(lambda driver: driver.execute("SELECT 1", timeout=PING_TIMEOUT_S))
    except Exception as error:  # of the driver, which is not imported here
        raise InvalidatePoolError(f"the connection does not reply: {error!r}") from error


def _disconnect_on_timeout(context: ExceptionContext) -> None:
    """Replace all idle connections after a statement has timed out, and close the statement's own."""
    if isinstance(context.original_exception, asyncio.TimeoutError):
        context.is_disconnect = context.invalidate_pool_on_disconnect = True


def _make_sqlite_engine(url: URL, connections: SqliteConnections) -> AsyncEngine:
    if url.database:  # a path, or an SQLite URI
        Path(url.database.removeprefix("file:")).parent.mkdir(parents=True, exist_ok=True)
    arguments = {"timeout": LOCK_TIMEOUT_S, "cached_statements": _STATEMENTS}
    arguments = {name: value for name, value in arguments.items() if name not in url.query}
    engine = create_async_engine(url, connect_args={"async_creator_fn": connections.connect, **arguments})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # the driver must not send BEGIN: ``_begin_sqlite`` does
    cursor = connection.cursor()
    # A process that is killed loses nothing. A power failure may undo the last commits: their lines run again.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=OFF", "cache_size=-4000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """Begin a transaction, and lock the database at once if it will write.

    SQLite refuses to write in a transaction that has read rows which have changed since.
    """
    writes = connection.get_execution_options().get("toka_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
