"""Connections to SQLite whose threads have ended when the store is closed.

The driver runs each connection on a thread of its own. A task that is cancelled during a statement leaves the thread
running, and its result arrives at the event loop later.
"""

import asyncio
import sqlite3
from typing import Any

import aiosqlite

_ROWS = 64  # rows that the driver fetches at once when a cursor is iterated, its own default


class SqliteConnections:
    """Opens the connections of a store. All methods run on the gateway's event loop."""

    def __init__(self) -> None:
        self._stopping: set[asyncio.Future[Any]] = set()

    def connect(self, database: str, **options: Any) -> aiosqlite.Connection:
        """Return a connection that opens when it is awaited. ``options`` are those of ``sqlite3.connect``."""
        return _Connection(self._stopping, database, options)

    async def stopped(self) -> None:
        """Wait until each thread that was asked to stop has finished its statements."""
        await asyncio.gather(*self._stopping, return_exceptions=True)


class _Connection(aiosqlite.Connection):
    """A connection whose thread is asked to stop once.

    SQLAlchemy stops the thread of a cancelled connection while a task is closing it. The driver would put a second
    request into the queue of the thread that has ended, and wait for its result forever.
    """

    def __init__(self, stopping: set[asyncio.Future[Any]], database: str, options: dict[str, Any]) -> None:
        super().__init__(lambda: sqlite3.connect(database, **options), _ROWS)
        self._thread.daemon = True  # as SQLAlchemy does for its own connections
        self._stopping = stopping
        self._stopped: asyncio.Future[Any] | None = None
        self._asked = False

    def stop(self) -> asyncio.Future[Any] | None:
        """Ask the thread to close the connection and to end. Returns its result, or None outside of an event loop."""
        if not self._asked:
            self._asked = True
            self._stopped = super().stop()
            if self._stopped is not None:
                self._stopping.add(self._stopped)
                self._stopped.add_done_callback(self._stopping.discard)
        # A task that is cancelled while it waits must not cancel the result, for which the store waits too.
        return None if self._stopped is None else asyncio.shield(self._stopped)
