"""Storage of chat completions with ``store: true``."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import InvalidValue, NotFound
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.text import TextEngine
from services.gateway.http.idempotency import fingerprint
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.chat_shape import ChatShape, MakeReader, Readers
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.output.deltas import Delta
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.storing import opened_for, try_to_store
from services.gateway.openai.transcript import Piece, joined
from services.gateway.store.chats import Chats
from services.gateway.store.ids import new_id

CHAT = "/v1/chat/completions"
_PREFIX = "chatcmpl-"


@dataclass(frozen=True)
class ChatKeeper:
    """Keeps one chat completion, under an id that schedulers and logs do not know."""

    text: TextEngine
    records: Chats
    id: str
    messages: bytes  # JSON of the messages that it answers
    labels: dict[str, str] | None
    key_name: str

    @classmethod
    async def of(cls, gateway: Gateway, body: ChatBody, caller: Caller, posted: Posted) -> "ChatKeeper":
        """Return the keeper of the answer to ``body``.

        Raises InvalidRequest if there is no store, and the errors of the store.
        """
        store = await opened_for(gateway, "store")
        if any("\0" in text for label in (body.metadata or {}).items() for text in label):
            raise InvalidValue.at("metadata", "a stored key or value has no NUL character")
        chat_id = new_id(_PREFIX)
        if caller.idempotency_key:
            same = fingerprint(CHAT, posted.raw)
            chat_id = _PREFIX + await store.tries.name(caller.owner, caller.idempotency_key, same)
        messages = await gateway.text.worked(posted.bytes, _dumped, body, chat_id)
        return cls(gateway.text, store.chats, chat_id, messages, body.metadata, caller.owner)

    async def earlier(self) -> bytes | None:
        """Return the chat completion that an earlier try of this request stored, or None."""
        with contextlib.suppress(NotFound):
            return (await self.records.get(self.id, self.key_name)).body
        return None

    async def keep(self, body: bytes, model: str) -> bool:
        """Store the chat completion. Return whether it is stored. The client gets its answer in any case."""
        storing = self.records.keep(self.id, body, self.messages, model, self.labels, self.key_name)
        return await try_to_store("chat completion", self.id, storing)


class ReplayedReaders(Readers):
    """Readers of a stream that return all deltas of a choice once more after its end."""

    def __init__(self, make: MakeReader) -> None:
        super().__init__(make)
        self._deltas: dict[int, list[Delta]] = {}  # by choice
        self._ended: set[int] = set()

    def read(self, index: int, text: str, *, last: bool) -> list[Delta] | None:
        if index in self._ended:
            return self._deltas.get(index)
        deltas = super().read(index, text, last=last)
        if deltas is not None:
            self._deltas.setdefault(index, []).extend(deltas)
        if last:
            self._ended.add(index)
        return deltas


class StoredChatShape(ChatShape):
    """The shape of a chat completion that is stored before its end is sent.

    If storing fails, the chat completion has ``store: false``.
    """

    def __init__(self, keeper: ChatKeeper, *arguments: Any, make_reader: MakeReader, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._readers = ReplayedReaders(make_reader)
        self._keeper = keeper
        self._head["id"] = keeper.id
        self._written: dict[int, bytes] = {}  # JSON of whole choices, by index
        self._streamed: dict[int, list[Piece]] = {}  # pieces of streamed choices, by index
        self._whole = b""

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        self._streamed.setdefault(index, []).append(piece)
        return super().chunk(index, piece, reason)

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        self._written[choice.index] = written = super().choice(choice, piece)
        return written

    async def settle(self, choices: Sequence[ActiveSample]) -> None:
        if self._streamed:
            await self._keeper.text.in_thread(self._write_streamed, choices)
        self._whole = super().whole(choices, [self._written[choice.index] for choice in choices])
        if not await self._keeper.keep(self._whole, str(self._head["model"])):
            self._whole = self._whole[:-1] + b',"store":false}'

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        return self._whole

    def _write_streamed(self, choices: Sequence[ActiveSample]) -> None:
        for choice in choices:
            self.choice(choice, joined(self._streamed.pop(choice.index)))


def _dumped(body: ChatBody, chat_id: str) -> bytes:
    """Return the messages of ``body`` as JSON, in the form in which they are listed."""
    messages = []
    for number, message in enumerate(body.messages):
        given = message.content
        # An unknown member of a message may be named ``id``, and must not replace the id of the list.
        dumped = message.model_dump(exclude_none=True, exclude={"id"})
        parts = [part.model_dump() for part in given] if isinstance(given, list) else None
        more = {"content": None if given is None else message.text, "content_parts": parts}
        messages.append({"id": f"{chat_id}-{number}", "refusal": None, **dumped, **more})
    return orjson.dumps(messages)
