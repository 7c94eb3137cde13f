"""Stored chat completions, which are created with ``store: true``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.gateway.store.database import Store
from services.gateway.store.expiry import AT_ONCE, delete_some
from services.gateway.store.ids import now
from services.gateway.store.inserts import Inserts
from services.gateway.store.owned import OwnedRows
from services.gateway.store.responses import MAX_WAITING_BYTES
from services.gateway.store.tables import StoredChat

CHATS_EXPIRE_S = 30 * 24 * 3600
_CHATS = OwnedRows(
    StoredChat,
    StoredChat.key_name,
    "chat completion",
    "completion_id",
    ": it was not stored with store=true, was deleted, or is older than 30 days",
    visible=lambda: StoredChat.expires_at > now(),
)


@dataclass(frozen=True)
class ChatFilter:
    """A filter of stored chat completions. None matches all."""

    model: str | None = None
    labels: Mapping[str, str] | None = None


class Chats:
    """The chat completions in ``store``. Each is visible only to the API key that created it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._inserts = Inserts(store, StoredChat)

    async def keep(
        self, chat_id: str, body: bytes, messages: bytes, model: str, labels: dict[str, str] | None, key_name: str
    ) -> None:
        """Store a chat completion.

        ``body`` is its JSON and ``messages`` the JSON of the messages it answers. Raises ``AlreadyExists``,
        ``Overloaded`` if too many bytes wait for the store, and the store's errors.
        """
        created_at = now()
        row = {
            "id": chat_id,
            "body": body,
            "items": messages,
            "model": model,
            "labels": labels,
            "created_at": created_at,
            "expires_at": created_at + CHATS_EXPIRE_S,
            "key_name": key_name,
        }
        await self._inserts.add(row, len(body) + len(messages), MAX_WAITING_BYTES)

    async def get(self, chat_id: str, key_name: str) -> StoredChat:
        """Return a chat completion without its messages. Raises ``NotFound``, also for another key's."""
        async with self._store.reading() as session:
            return await _CHATS.find(session, chat_id, key_name)

    async def messages(self, chat_id: str, key_name: str) -> bytes:
        """Return the JSON of the messages that a chat completion answers. Raises ``NotFound``."""
        async with self._store.reading() as session:
            return (await _CHATS.find(session, chat_id, key_name, read=StoredChat.items)).items

    async def update(self, chat_id: str, labels: dict[str, str] | None, key_name: str) -> StoredChat:
        """Replace the labels of a chat completion. Raises ``NotFound``."""
        async with self._store.writing() as session:
            chat = await _CHATS.find(session, chat_id, key_name, locked=True)
            chat.labels = labels
            return chat

    async def delete(self, chat_id: str, key_name: str) -> None:
        """Delete a chat completion. Raises ``NotFound``."""
        async with self._store.writing() as session:
            await session.delete(await _CHATS.find(session, chat_id, key_name))

    async def page(
        self, key_name: str, wanted: ChatFilter, *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[Sequence[StoredChat], bool]:
        """Return at most ``limit`` chat completions after ``after``, without messages, and whether there are more.

        Raises ``InvalidRequest`` if there is no chat completion ``after``.
        """
        conditions = [StoredChat.labels[name].as_string() == value for name, value in (wanted.labels or {}).items()]
        if wanted.model is not None:
            conditions.append(StoredChat.model == wanted.model)
        async with self._store.reading() as session:
            return await _CHATS.page(
                session, key_name, *conditions, after=after, limit=limit, newest_first=newest_first
            )

    async def forget_expired(self) -> bool:
        """Delete a number of expired chat completions. Return whether there may be more."""
        async with self._store.writing() as session:
            return await delete_some(session, StoredChat, StoredChat.expires_at <= now()) == AT_ONCE
