"""Records of responses: kept, found, deleted, and forgotten when their time is over."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
import structlog
from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from services.common.errors import AlreadyExists, NotFound, Overloaded, TokaError, Unavailable
from services.gateway.batch.ids import now
from services.gateway.batch.store import Store, rows_changed
from services.gateway.batch.tables import StoredResponse

log = structlog.get_logger(__name__)

# As OpenAI keeps them.
RESPONSES_EXPIRE_S = 30 * 24 * 3600
_FORGOTTEN_AT_ONCE = 1000
_KEPT_AT_ONCE = 256  # in a transaction
MAX_WAITING_BYTES = 256 * 1024 * 1024  # for a store that is slow; beyond it nothing more is kept


@dataclass(frozen=True)
class KeptResponse:
    """A response, and all that came before its output: earlier turns as well, so that it outlives them."""

    body: bytes  # JSON
    items: bytes  # JSON: a list of the conversation's items, each with an id of its own

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + len(self.items)


class Responses:
    """The records in ``store``. Those that end while a transaction runs share the next one: a burst of them leaves the
    store to others, too."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[asyncio.Future[None], dict[str, Any]] = {}  # records by who waits
        self._waiting_bytes = 0  # of all that somebody waits for
        self._writer: asyncio.Task[None] | None = None

    async def keep(self, body: dict[str, Any], items: bytes, key_name: str = "") -> None:
        """Keep a response of the API key ``key_name`` from now on. A caller who does not wait for it wants it no more.
        ``items``: see ``KeptResponse``. Raises ``AlreadyExists`` when one with its id is kept, ``Overloaded`` when too
        much waits, and whatever the store does."""
        created_at = now()
        record = {
            "id": body["id"],
            "body": orjson.dumps(body),
            "items": items,
            "created_at": created_at,
            "expires_at": created_at + RESPONSES_EXPIRE_S,
            "key_name": key_name,
        }
        size = len(record["body"]) + len(items)
        if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Overloaded(f"{self._waiting_bytes} bytes of responses wait for the store already", retry_after_s=1.0)
        kept = asyncio.get_running_loop().create_future()
        self._waiting[kept] = record
        self._waiting_bytes += size
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting())
        try:
            await kept
        finally:
            self._waiting.pop(kept, None)
            self._waiting_bytes -= size

    async def get(self, response_id: str, key_name: str = "") -> KeptResponse:
        """Raises ``NotFound``, also for one that another key made."""
        query = select(StoredResponse).where(*_own(response_id, key_name))
        async with self._store.reading() as session:
            record = await session.scalar(query)
        if record is None:
            raise _not_found(response_id)
        return KeptResponse(record.body, record.items)

    async def delete(self, response_id: str, key_name: str = "") -> None:
        """Forget it. Raises ``NotFound``, also for one that another key made."""
        query = delete(StoredResponse).where(*_own(response_id, key_name))
        async with self._store.writing() as session:
            gone = await rows_changed(session, query)
        if not gone:
            raise _not_found(response_id)

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                some = dict(islice(self._waiting.items(), _KEPT_AT_ONCE))
                for kept in some:
                    del self._waiting[kept]
                await self._write(some)
        finally:
            self._writer = None

    async def _write(self, some: Mapping[asyncio.Future[None], dict[str, Any]]) -> None:
        """All of ``some``; where the store is there and takes them not together, each by itself."""
        problem = await self._insert(list(some.values()))
        problems: dict[asyncio.Future[None], Exception | None] = dict.fromkeys(some, problem)
        if problem is not None and len(some) > 1 and not isinstance(problem, Unavailable):
            for kept in [kept for kept in some if not kept.done()]:
                problems[kept] = await self._insert([some[kept]])
        unwanted = [record["id"] for kept, record in some.items() if kept.done() and problems[kept] is None]
        for kept, problem in problems.items():
            if not kept.done():
                kept.set_result(None) if problem is None else kept.set_exception(problem)
        if unwanted:
            await self._take_back(unwanted)

    async def _insert(self, records: list[dict[str, Any]]) -> Exception | None:
        """In one transaction; or why not."""
        try:
            async with self._store.writing() as session:
                await session.execute(insert(StoredResponse), records)
        except IntegrityError as error:
            return await self._kept_already(records) or error
        except Exception as error:
            return error
        return None

    async def _kept_already(self, records: list[dict[str, Any]]) -> Exception | None:
        """Of a record that was refused: the reason, if it is that another try of its request was first."""
        if len(records) > 1:
            return None
        try:
            await self.get(records[0]["id"], records[0]["key_name"])
        except NotFound:
            return None
        except TokaError as error:
            return error
        return AlreadyExists("a response with this id is kept already")

    async def _take_back(self, ids: Sequence[str]) -> None:
        """Their callers left while they were written, and told their clients that they are not kept."""
        try:
            async with self._store.writing() as session:
                await session.execute(delete(StoredResponse).where(StoredResponse.id.in_(ids)))
        except Exception:
            log.exception("responses stay in the store that should not", ids=len(ids))

    async def forget_expired(self) -> bool:
        """Forget some of those whose time is over: whether there may be more."""
        expired = select(StoredResponse.seq).where(StoredResponse.expires_at <= now()).limit(_FORGOTTEN_AT_ONCE)
        async with self._store.writing() as session:
            found = (await session.scalars(expired)).all()
            if found:
                await session.execute(delete(StoredResponse).where(StoredResponse.seq.in_(found)))
        return len(found) == _FORGOTTEN_AT_ONCE


def _own(response_id: str, key_name: str) -> tuple[Any, ...]:
    own = StoredResponse.id == response_id, StoredResponse.key_name == key_name
    return *own, StoredResponse.expires_at > now()


def _not_found(response_id: str) -> NotFound:
    return NotFound(
        f"there is no response {response_id[:100]!r}: it was not stored, was deleted, or is older than 30 days",
        field="response_id",
        reason="RESPONSE_NOT_FOUND",
    )
