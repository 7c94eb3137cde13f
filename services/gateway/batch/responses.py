"""Records of responses: kept, found, deleted, and forgotten when their time is over."""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import delete, insert, select

from services.common.errors import NotFound
from services.gateway.batch.ids import now
from services.gateway.batch.store import Store
from services.gateway.batch.tables import StoredResponse

# As OpenAI keeps them.
RESPONSES_EXPIRE_S = 30 * 24 * 3600
_FORGOTTEN_AT_ONCE = 1000
_KEPT_AT_ONCE = 256  # in a transaction


@dataclass(frozen=True)
class KeptResponse:
    """A response, and all that came before its output: earlier turns as well, so that it outlives them."""

    body: bytes  # JSON
    items: list[dict[str, Any]]  # of the conversation, each with an id

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """What a response that goes on with it begins with."""
        return [*self.items, *orjson.loads(self.body)["output"]]


class Responses:
    """The records in ``store``. Those that end while a transaction runs share the next one: a burst of them leaves the
    store to others, too."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._writer: asyncio.Task | None = None

    async def keep(self, body: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response from now on, even if the caller does not wait. ``items``: see ``KeptResponse``."""
        created_at = now()
        record = {
            "id": body["id"],
            "body": orjson.dumps(body),
            "items": orjson.dumps(items),
            "created_at": created_at,
            "expires_at": created_at + RESPONSES_EXPIRE_S,
        }
        kept = asyncio.get_running_loop().create_future()
        self._waiting.append((record, kept))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting())
        await kept

    async def get(self, response_id: str) -> KeptResponse:
        """Raises ``NotFound``."""
        query = select(StoredResponse).where(StoredResponse.id == response_id, StoredResponse.expires_at > now())
        async with self._store.reading() as session:
            record = await session.scalar(query)
        if record is None:
            raise _not_found(response_id)
        return KeptResponse(record.body, orjson.loads(record.items))

    async def delete(self, response_id: str) -> None:
        """Forget it. Raises ``NotFound``."""
        query = delete(StoredResponse).where(StoredResponse.id == response_id, StoredResponse.expires_at > now())
        async with self._store.writing() as session:
            gone = (await session.execute(query)).rowcount
        if not gone:
            raise _not_found(response_id)

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:_KEPT_AT_ONCE], self._waiting[_KEPT_AT_ONCE:]
                try:
                    async with self._store.writing() as session:
                        await session.execute(insert(StoredResponse), [record for record, _ in some])
                    problem = None
                except Exception as error:
                    problem = error
                for kept in (kept for _, kept in some if not kept.done()):
                    kept.set_result(None) if problem is None else kept.set_exception(problem)
        finally:
            self._writer = None

    async def forget_expired(self) -> None:
        """Forget some of those whose time is over."""
        expired = select(StoredResponse.seq).where(StoredResponse.expires_at <= now()).limit(_FORGOTTEN_AT_ONCE)
        async with self._store.writing() as session:
            found = (await session.scalars(expired)).all()
            if found:
                await session.execute(delete(StoredResponse).where(StoredResponse.seq.in_(found)))


def _not_found(response_id: str) -> NotFound:
    return NotFound(
        f"there is no response {response_id[:100]!r}: it was not stored, was deleted, or is older than 30 days",
        field="response_id",
        reason="RESPONSE_NOT_FOUND",
    )
