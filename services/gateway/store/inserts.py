"""Grouped inserts: rows that arrive while a transaction runs share the next one, so that a burst needs few."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import structlog
from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from services.common.boundaries import errors_logged
from services.common.errors import AlreadyExists, Overloaded, TokaError, Unavailable
from services.gateway.store.database import Store
from services.gateway.store.tables import StoredChat, StoredResponse

log = structlog.get_logger(__name__)

_INSERTED_AT_ONCE = 256  # rows of a transaction


class Inserts:
    """Inserts rows into one table, on the gateway's event loop."""

    def __init__(self, store: Store, table: type[StoredResponse | StoredChat]) -> None:
        self._store = store
        self._table = table
        self._waiting: dict[asyncio.Future[None], dict[str, Any]] = {}  # rows by the future that the caller awaits
        self._waiting_bytes = 0  # size of all rows whose callers wait
        self._writer: asyncio.Task[None] | None = None

    async def add(self, row: dict[str, Any], size: int, most_waiting: int) -> None:
        """Insert ``row`` of ``size`` bytes. If the caller is cancelled, the row is deleted.

        Raises ``AlreadyExists`` if the id is in use, ``Overloaded`` if more than ``most_waiting`` bytes would wait for
        the store, and the store's errors.
        """
        if self._waiting_bytes and self._waiting_bytes + size > most_waiting:
            raise Overloaded(f"{self._waiting_bytes} bytes already wait for the store", retry_after_s=1.0)
        added = asyncio.get_running_loop().create_future()
        self._waiting[added] = row
        self._waiting_bytes += size
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting())
        try:
            await added
        finally:
            self._waiting.pop(added, None)
            self._waiting_bytes -= size

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                some = dict(islice(self._waiting.items(), _INSERTED_AT_ONCE))
                for added in some:
                    del self._waiting[added]
                await self._write(some)
        finally:
            self._writer = None

    async def _write(self, some: Mapping[asyncio.Future[None], dict[str, Any]]) -> None:
        """Insert the rows together, or one by one if that fails."""
        problem = await self._insert(list(some.values()))
        problems: dict[asyncio.Future[None], Exception | None] = dict.fromkeys(some, problem)
        if problem is not None and len(some) > 1 and not isinstance(problem, Unavailable):
            for added in [added for added in some if not added.done()]:
                problems[added] = await self._insert([some[added]])
        unwanted = [row["id"] for added, row in some.items() if added.done() and problems[added] is None]
        for added, problem in problems.items():
            if not added.done():
                added.set_result(None) if problem is None else added.set_exception(problem)
        if unwanted:
            await self._take_back(unwanted)

    async def _insert(self, rows: list[dict[str, Any]]) -> Exception | None:
        """Insert ``rows`` in one transaction. Return the error instead of raising it."""
        try:
            async with self._store.writing() as session:
                await session.execute(insert(self._table), rows)
        except IntegrityError as error:
            return await self._exists(rows) or error
        except Exception as error:
            return error
        return None

    async def _exists(self, rows: list[dict[str, Any]]) -> Exception | None:
        """Return ``AlreadyExists`` if a single row failed because its owner has a row with the same id."""
        if len(rows) > 1:
            return None
        own = self._table.id == rows[0]["id"], self._table.key_name == rows[0]["key_name"]
        try:
            async with self._store.reading() as session:
                found = await session.scalar(select(self._table.seq).where(*own))
        except TokaError as error:
            return error
        return None if found is None else AlreadyExists("an object with this id is stored already")

    async def _take_back(self, ids: Sequence[str]) -> None:
        """Delete rows whose callers were cancelled during the insert."""
        failed = "rows of cancelled requests were not deleted"
        with errors_logged(log, failed, table=self._table.__tablename__, ids=len(ids)):
            async with self._store.writing() as session:
                await session.execute(delete(self._table).where(self._table.id.in_(ids)))
