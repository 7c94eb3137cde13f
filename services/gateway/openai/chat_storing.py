"""Storage of chat completions with ``store: true``. Those that are streamed are assembled from their chunks."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import InvalidRequest, InvalidValue, NotFound
from services.gateway.engine.active_request import ActiveSample
from services.gateway.http.idempotency import fingerprint
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.chat_shape import ChatShape
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.storing import try_to_store
from services.gateway.openai.transcript import Piece
from services.gateway.store.chats import Chats
from services.gateway.store.ids import new_id

CHAT = "/v1/chat/completions"
_PREFIX = "chatcmpl-"
_DATA = b"data: "


@dataclass(frozen=True)
class ChatKeeper:
    """Keeps one chat completion, under an id that schedulers and logs do not know."""

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
        try:
            store = await gateway.store.opened()
        except NotFound as error:  # the gateway was started without a store
            raise InvalidRequest(f"store: {error.message}", field="store", reason="UNSUPPORTED_PARAMETER") from None
        if any("\0" in text for label in (body.metadata or {}).items() for text in label):
            raise InvalidValue("metadata: a stored key or value has no NUL character", field="metadata")
        chat_id = new_id(_PREFIX)
        if caller.idempotency_key:
            same = fingerprint(CHAT, posted.raw)
            chat_id = _PREFIX + await store.tries.name(caller.owner, caller.idempotency_key, same)
        messages = await gateway.text.worked(posted.bytes, _dumped, body, chat_id)
        return cls(store.chats, chat_id, messages, body.metadata, caller.owner)

    async def earlier(self) -> bytes | None:
        """Return the chat completion that an earlier try of this request stored, or None."""
        with contextlib.suppress(NotFound):
            return (await self.records.get(self.id, self.key_name)).body
        return None

    async def keep(self, body: bytes, model: str) -> bool:
        """Store the chat completion. Return whether it is stored. The client gets its answer in any case."""
        storing = self.records.keep(self.id, body, self.messages, model, self.labels, self.key_name)
        return await try_to_store("chat completion", self.id, storing)


class StoredChatShape(ChatShape):
    """The shape of a chat completion that is stored before its end is sent.

    If storing fails, the chat completion has ``store: false``.
    """

    def __init__(self, keeper: ChatKeeper, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._keeper = keeper
        self._head["id"] = keeper.id
        self._written: dict[int, bytes] = {}  # JSON of whole choices, by index
        self._chunks = Chunks()
        self._whole = b""

    def opening(self, index: int) -> bytes:
        return self._chunks.push(super().opening(index))

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        return self._chunks.push(super().chunk(index, piece, reason))

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        self._written[choice.index] = written = super().choice(choice, piece)
        return written

    async def settle(self, choices: Sequence[ActiveSample]) -> None:
        if self._chunks.choices:
            extras = {"choices": self._chunks.joined(), "usage": self._usage(choices)}
            self._whole = orjson.dumps(self._head | extras | self._whole_extras())
        else:
            self._whole = super().whole(choices, [self._written[choice.index] for choice in choices])
        if not await self._keeper.keep(self._whole, str(self._head["model"])):
            self._whole = self._whole[:-1] + b',"store":false}'

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        return self._whole


class Chunks:
    """The choices of a streamed chat completion, assembled from the chunks that are sent."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}

    def push(self, events: bytes) -> bytes:
        """Add the chunks in ``events``, and return ``events``."""
        for event in events.split(b"\n\n"):
            if event.startswith(_DATA):
                for choice in orjson.loads(event.removeprefix(_DATA))["choices"]:
                    self._add(choice)
        return events

    def joined(self) -> list[dict[str, Any]]:
        """Return the choices in the form of a chat completion that is not streamed."""
        for choice in self.choices.values():
            message = choice["message"]
            if "tool_calls" in message:
                message["content"] = message["content"] or None
                calls = message["tool_calls"]
                message["tool_calls"] = [calls[number] for number in sorted(calls)]
        return [self.choices[index] for index in sorted(self.choices)]

    def _add(self, chunk: dict[str, Any]) -> None:
        message = {"role": "assistant", "content": "", "refusal": None}
        begun = {"index": chunk["index"], "message": message, "logprobs": None, "finish_reason": None}
        begun["stop_reason"] = None
        choice = self.choices.setdefault(chunk["index"], begun)
        for name, value in chunk.pop("delta").items():
            _join_message(choice["message"], name, value)
        for name, value in chunk.items():
            if isinstance(value, list):
                choice[name] = [*(choice.get(name) or ()), *value]
            elif name == "logprobs" and value is not None:
                before = (choice["logprobs"] or {"content": []})["content"]
                choice["logprobs"] = value | {"content": before + (value["content"] or [])}
            elif value is not None:
                choice[name] = value


def _join_message(message: dict[str, Any], name: str, value: Any) -> None:
    """Add one member of a delta to its message."""
    if name == "tool_calls":
        calls = message.setdefault("tool_calls", {})
        for call in value:
            whole = calls.setdefault(call.pop("index"), {"function": {"arguments": ""}})
            function = call.pop("function", {})
            whole["function"]["arguments"] += function.pop("arguments", "")
            whole["function"] = function | whole["function"] | function
            whole |= call
    elif isinstance(value, str) and name != "role":
        message[name] = (message.get(name) or "") + value
    else:
        message[name] = value


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
