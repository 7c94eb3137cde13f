"""Stored responses, and the leases of background responses."""

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import orjson
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from services.common.errors import AlreadyExists, InvalidRequest
from services.gateway.store.conversations import Addition, append
from services.gateway.store.database import Store
from services.gateway.store.expiry import AT_ONCE, delete_some
from services.gateway.store.ids import now
from services.gateway.store.inserts import Inserts
from services.gateway.store.leases import LEASE_S
from services.gateway.store.owned import OwnedRows
from services.gateway.store.tables import CANCELLED, FAILED, IN_PROGRESS, QUEUED, StoredEvents, StoredResponse

# The lifetime at OpenAI.
RESPONSES_EXPIRE_S = 30 * 24 * 3600
EVENTS_EXPIRE_S = 3600  # after the write
RUNNING = (QUEUED, IN_PROGRESS)
ABANDONED = "the gateway that generated this response ended before it was done; send the request again"
_FAILED_AT_ONCE = 100
_READ_AT_ONCE = 64
MAX_WAITING_BYTES = 256 * 1024 * 1024  # of responses that wait for a slow store. With more, further ones are rejected.
_RESPONSES = OwnedRows(
    StoredResponse,
    StoredResponse.key_name,
    "response",
    "response_id",
    ": it was not stored, was deleted, or is older than 30 days",
    visible=lambda: StoredResponse.expires_at > now(),
)


class Responses:
    """The records of responses in ``store``. ``owner`` is this gateway's name in leases."""

    def __init__(self, store: Store, owner: str = "") -> None:
        self._store = store
        self._owner = owner
        self._inserts = Inserts(store, StoredResponse)

    async def keep(
        self, body: dict[str, Any], items: bytes, key_name: str = "", addition: Addition | None = None
    ) -> None:
        """Store a response that has ended, and in the same transaction append its items to a conversation.

        A failed response with the same id is replaced: the request was sent again. ``items`` is as in
        ``StoredResponse``. Raises ``AlreadyExists`` if the id is in use, ``NotFound`` if the conversation was deleted,
        ``Overloaded`` if too many bytes wait for the store, and the store's errors.
        """
        record = _record(body, items, key_name)
        if addition is None:
            with contextlib.suppress(AlreadyExists):
                await self._inserts.add(record, len(record["body"]) + len(items), MAX_WAITING_BYTES)
                return
        own = StoredResponse.id == record["id"], StoredResponse.key_name == key_name
        try:
            async with self._store.writing() as session:
                await session.execute(delete(StoredResponse).where(*own, StoredResponse.status == FAILED))
                if addition is not None:
                    await append(session, addition, key_name)
                await session.execute(insert(StoredResponse), record)
        except IntegrityError as error:
            raise AlreadyExists("a response with this id is stored already") from error

    async def get(self, response_id: str, key_name: str = "", *, with_items: bool = False) -> StoredResponse:
        """Return a response, with its ``items`` if ``with_items``. Raises ``NotFound``, also for another key's."""
        read = StoredResponse.items if with_items else None
        async with self._store.reading() as session:
            return await _RESPONSES.find(session, response_id, key_name, read=read)

    async def bodies(self, ids: Collection[str], key_name: str, most_bytes: int) -> list[bytes]:
        """Return the bodies of the key's responses among ``ids``. Stop reading after more than ``most_bytes``."""
        found: list[bytes] = []
        names = list(ids)
        async with self._store.reading() as session:
            for first in range(0, len(names), _READ_AT_ONCE):
                some = StoredResponse.id.in_(names[first : first + _READ_AT_ONCE])
                own = some, StoredResponse.key_name == key_name, StoredResponse.expires_at > now()
                for body in await session.scalars(select(StoredResponse.body).where(*own)):
                    found.append(body)
                if sum(map(len, found)) > most_bytes:
                    break
        return found

    async def delete(self, response_id: str, key_name: str = "") -> None:
        """Delete a response. Raises ``NotFound``, also for another key's."""
        async with self._store.writing() as session:
            await session.delete(await _RESPONSES.find(session, response_id, key_name))
            await session.execute(delete(StoredEvents).where(StoredEvents.response_id == response_id))

    # Background responses.

    async def begin(self, body: dict[str, Any], items: bytes, key_name: str, events: bytes = b"") -> None:
        """Store a background response, with its first ``events`` if it is streamed, and lease it.

        Raises ``AlreadyExists`` if the id is in use.
        """
        lease = {"owner": self._owner, "lease_until": time.time() + LEASE_S}
        try:
            async with self._store.writing() as session:
                await session.execute(insert(StoredResponse), _record(body, items, key_name) | lease)
                if events:
                    await session.execute(insert(StoredEvents), _events_row(body["id"], 0, events))
        except IntegrityError as error:
            raise AlreadyExists("a response with this id is stored already") from error

    async def progress(self, body: dict[str, Any]) -> bool:
        """Store the new state of a response that this gateway generates. Return False if it no longer does."""
        async with self._store.writing() as session:
            return await self._change(session, body) is not None

    async def end(self, body: dict[str, Any], key_name: str, addition: Addition | None) -> bool:
        """Store the final state of a response that this gateway generates, and append its items to a conversation.

        Return False if it no longer generates it. Raises ``NotFound`` if the conversation was deleted.
        """
        async with self._store.writing() as session:
            if await self._change(session, body, owner=None, lease_until=None) is None:
                return False
            if addition is not None:
                await append(session, addition, key_name)
        return True

    async def beat(self, ids: Collection[str]) -> set[str]:
        """Extend the leases of the responses ``ids``. Return those that this gateway still generates."""
        mine = StoredResponse.id.in_(ids), StoredResponse.owner == self._owner, StoredResponse.status.in_(RUNNING)
        async with self._store.writing() as session:
            await session.execute(update(StoredResponse).where(*mine).values(lease_until=time.time() + LEASE_S))
            return set(await session.scalars(select(StoredResponse.id).where(*mine)))

    async def cancel(self, response_id: str, key_name: str) -> bytes:
        """Cancel a background response, if it has not ended. Return its body.

        Raises ``NotFound``, also for another key's, and ``InvalidRequest`` if it is not a background response.
        """
        async with self._store.writing() as session:
            record = await _RESPONSES.find(session, response_id, key_name, locked=True)
            body = orjson.loads(record.body)
            if not body.get("background"):
                raise InvalidRequest(
                    f"response_id: {response_id[:100]!r} was not created with background=true; to stop it, close"
                    " its connection",
                    field="response_id",
                    reason="RESPONSE_NOT_CANCELLABLE",
                )
            if record.status in RUNNING:
                record.body = orjson.dumps(body | {"status": CANCELLED})
                record.status, record.owner, record.lease_until = CANCELLED, None, None
            return record.body

    async def fail_abandoned(self) -> bool:
        """Mark a number of responses with expired leases as failed. Return whether there may be more."""
        expired = StoredResponse.lease_until < time.time()
        query = select(StoredResponse).where(expired, StoredResponse.status.in_(RUNNING)).limit(_FAILED_AT_ONCE)
        async with self._store.reading() as session:
            seqs = [record.seq for record in await session.scalars(query)]
        if not seqs:
            return False
        async with self._store.writing() as session:
            locked = (
                select(StoredResponse).where(StoredResponse.seq.in_(seqs), expired).with_for_update(skip_locked=True)
            )
            for record in await session.scalars(locked):
                if record.status in RUNNING:
                    error = {"code": "server_error", "message": ABANDONED}
                    record.body = orjson.dumps(orjson.loads(record.body) | {"status": FAILED, "error": error})
                    record.status, record.owner, record.lease_until = FAILED, None, None
        return len(seqs) == _FAILED_AT_ONCE

    async def add_events(self, events: Sequence[tuple[str, int, bytes]]) -> None:
        """Store events of streamed background responses: the response's id, the number of the first event, the events.

        They replace events that an earlier call may have stored although it failed.
        """
        async with self._store.writing() as session:
            for response_id, number, _ in events:
                own = StoredEvents.response_id == response_id
                await session.execute(delete(StoredEvents).where(own, StoredEvents.number >= number))
            await session.execute(insert(StoredEvents), [_events_row(*each) for each in events])

    async def events(self, response_id: str, number: int) -> list[tuple[int, bytes]]:
        """Return the stored events of a response in order, from the row that may hold event ``number``.

        Each row is the number of its first event, and the events.
        """
        own = StoredEvents.response_id == response_id
        first = select(func.max(StoredEvents.number)).where(own, StoredEvents.number <= number)
        query = select(StoredEvents.number, StoredEvents.data).where(own).order_by(StoredEvents.number)
        async with self._store.reading() as session:
            begin = await session.scalar(first)
            rows = await session.execute(query.where(StoredEvents.number >= (begin or 0)))
            return [(row.number, row.data) for row in rows]

    async def forget_expired(self) -> bool:
        """Delete a number of expired responses and events. Return whether there may be more."""
        async with self._store.writing() as session:
            responses = await delete_some(session, StoredResponse, StoredResponse.expires_at <= now())
            events = await delete_some(session, StoredEvents, StoredEvents.created_at <= now() - EVENTS_EXPIRE_S)
            return AT_ONCE in (responses, events)

    async def _change(self, session: AsyncSession, body: dict[str, Any], **values: Any) -> int | None:
        mine = StoredResponse.id == body["id"], StoredResponse.owner == self._owner, StoredResponse.status.in_(RUNNING)
        seq = await session.scalar(select(StoredResponse.seq).where(*mine).with_for_update())
        if seq is not None:
            values |= {"status": body["status"], "body": orjson.dumps(body)}
            await session.execute(update(StoredResponse).where(StoredResponse.seq == seq).values(**values))
        return seq


def _record(body: dict[str, Any], items: bytes, key_name: str) -> dict[str, Any]:
    created_at = now()
    return {
        "id": body["id"],
        "body": orjson.dumps(body),
        "items": items,
        "created_at": created_at,
        "expires_at": created_at + RESPONSES_EXPIRE_S,
        "key_name": key_name,
        "status": body.get("status", "completed"),
    }


def _events_row(response_id: str, number: int, data: bytes) -> dict[str, Any]:
    return {"response_id": response_id, "number": number, "data": data, "created_at": now()}
