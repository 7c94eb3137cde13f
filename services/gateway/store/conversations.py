"""Stored conversations: ordered items that responses read and append to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from services.common.errors import InvalidValue
from services.gateway.store.database import Store
from services.gateway.store.expiry import AT_ONCE, delete_some
from services.gateway.store.ids import new_id, now
from services.gateway.store.owned import OwnedRows
from services.gateway.store.tables import StoredConversation, StoredItem

CONVERSATIONS_EXPIRE_S = 30 * 24 * 3600  # after the last change
MAX_ITEMS = 65_536  # of a conversation
MAX_BYTES = 4 * 1024 * 1024  # of JSON in a conversation
_CONVERSATIONS = OwnedRows(
    StoredConversation,
    StoredConversation.key_name,
    "conversation",
    "conversation_id",
    ": it was deleted, or not used for 30 days",
    visible=lambda: StoredConversation.expires_at > now(),
)
_ITEMS = OwnedRows(StoredItem, StoredItem.conversation_seq, "item", "item_id", " in the conversation")
_MAX_ID_LENGTH = 64
_DELETED_AT_ONCE = 100
_ASKED_AT_ONCE = 500  # ids in a statement


class Addition(NamedTuple):
    """The items that a response appends to its conversation: its input and its output."""

    conversation_id: str
    items: Sequence[dict[str, Any]]


class Conversations:
    """The conversations in ``store``. Each is visible only to the API key that created it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(
        self, labels: dict[str, str] | None, items: Sequence[dict[str, Any]], key_name: str
    ) -> StoredConversation:
        """Create a conversation. Raises ``InvalidRequest`` for too many or too large items."""
        created_at = now()
        conversation = StoredConversation(
            id=new_id("conv_"), labels=labels, items=0, bytes=0, created_at=created_at, key_name=key_name,
            expires_at=created_at + CONVERSATIONS_EXPIRE_S,
        )  # fmt: skip
        async with self._store.writing() as session:
            session.add(conversation)
            await session.flush()
            await _add(session, conversation, items, bounded=True)
        return conversation

    async def get(self, conversation_id: str, key_name: str) -> StoredConversation:
        """Return a conversation. Raises ``NotFound``."""
        async with self._store.reading() as session:
            return await _CONVERSATIONS.find(session, conversation_id, key_name)

    async def update(self, conversation_id: str, labels: dict[str, str] | None, key_name: str) -> StoredConversation:
        """Replace the labels of a conversation. Raises ``NotFound``."""
        async with self._store.writing() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name, locked=True)
            conversation.labels = labels
            _postpone(conversation)
            return conversation

    async def delete(self, conversation_id: str, key_name: str) -> None:
        """Delete a conversation and its items. Raises ``NotFound``."""
        async with self._store.writing() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name, locked=True)
            await _delete(session, [conversation.seq])

    async def add(self, conversation_id: str, items: Sequence[dict[str, Any]], key_name: str) -> list[dict[str, Any]]:
        """Append items. Return them with their stored ids. Raises ``NotFound`` and ``InvalidRequest``."""
        async with self._store.writing() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name, locked=True)
            return await _add(session, conversation, items, bounded=True)

    async def append(self, addition: Addition, key_name: str) -> None:
        """Append the items of a response that is not stored itself. Raises ``NotFound``."""
        async with self._store.writing() as session:
            await append(session, addition, key_name)

    async def items(self, conversation_id: str, key_name: str) -> list[bytes]:
        """Return the JSON of all items, in order. Raises ``NotFound``."""
        async with self._store.reading() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name)
            own = StoredItem.conversation_seq == conversation.seq
            return list(await session.scalars(select(StoredItem.body).where(own).order_by(StoredItem.seq)))

    async def page(
        self, conversation_id: str, key_name: str, *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[bytes], bool]:
        """Return the JSON of at most ``limit`` items after ``after``, and whether there are more.

        Raises ``NotFound``, and ``InvalidRequest`` if there is no item ``after``.
        """
        async with self._store.reading() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name)
            found, has_more = await _ITEMS.page(
                session, conversation.seq, after=after, limit=limit, newest_first=newest_first
            )
            return [item.body for item in found], has_more

    async def item(self, conversation_id: str, item_id: str, key_name: str) -> bytes:
        """Return the JSON of an item. Raises ``NotFound``."""
        async with self._store.reading() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name)
            return (await _ITEMS.find(session, item_id, conversation.seq)).body

    async def delete_item(self, conversation_id: str, item_id: str, key_name: str) -> StoredConversation:
        """Delete an item. Return its conversation. Raises ``NotFound``."""
        async with self._store.writing() as session:
            conversation = await _CONVERSATIONS.find(session, conversation_id, key_name, locked=True)
            item = await _ITEMS.find(session, item_id, conversation.seq)
            conversation.items -= 1
            conversation.bytes -= len(item.body)
            _postpone(conversation)
            await session.delete(item)
            return conversation

    async def forget_expired(self) -> bool:
        """Delete a number of expired conversations, with their items. Return whether there may be more."""
        expired = select(StoredConversation.seq).where(StoredConversation.expires_at <= now())
        async with self._store.writing() as session:
            found = (await session.scalars(expired.limit(_DELETED_AT_ONCE).with_for_update())).all()
            if not found:
                return False
            if await delete_some(session, StoredItem, StoredItem.conversation_seq.in_(found)) == AT_ONCE:
                return True
            await _delete(session, found)
        return len(found) == _DELETED_AT_ONCE


async def append(session: AsyncSession, addition: Addition, key_name: str) -> None:
    """Append the items of a response to its conversation. Raises ``NotFound`` if the conversation was deleted.

    The limits are not checked here. They were checked before the response was generated.
    """
    conversation = await _CONVERSATIONS.find(session, addition.conversation_id, key_name, locked=True)
    await _add(session, conversation, addition.items, bounded=False)


async def _add(
    session: AsyncSession, conversation: StoredConversation, items: Sequence[dict[str, Any]], *, bounded: bool
) -> list[dict[str, Any]]:
    own = StoredItem.conversation_seq == conversation.seq
    given, taken = [item["id"] for item in items if _fits(item["id"])], set[str]()
    for first in range(0, len(given), _ASKED_AT_ONCE):
        some = StoredItem.id.in_(given[first : first + _ASKED_AT_ONCE])
        taken.update(await session.scalars(select(StoredItem.id).where(own, some)))
    added, rows = [], []
    for item in items:
        name = item["id"]
        if name in taken or not _fits(name):
            name = new_id(f"{name.partition('_')[0][:8]}_") if _fits(name) else new_id("item_")
        taken.add(name)
        added.append(item | {"id": name})
        rows.append({"conversation_seq": conversation.seq, "id": name, "body": orjson.dumps(added[-1])})
    conversation.items += len(rows)
    conversation.bytes += sum(len(row["body"]) for row in rows)
    if bounded and (conversation.items > MAX_ITEMS or conversation.bytes > MAX_BYTES):
        raise InvalidValue(
            f"items: a conversation has at most {MAX_ITEMS} items and {MAX_BYTES} bytes of JSON; begin a new one with"
            " what is still needed",
            field="items",
        )
    _postpone(conversation)
    await session.flush()
    if rows:
        await session.execute(insert(StoredItem), rows)
    return added


def _fits(name: str) -> bool:
    return len(name) <= _MAX_ID_LENGTH and "\0" not in name


def _postpone(conversation: StoredConversation) -> None:
    conversation.expires_at = now() + CONVERSATIONS_EXPIRE_S


async def _delete(session: AsyncSession, seqs: Sequence[int]) -> None:
    await session.execute(delete(StoredItem).where(StoredItem.conversation_seq.in_(seqs)))
    await session.execute(delete(StoredConversation).where(StoredConversation.seq.in_(seqs)))
