"""The JSON of Messages answers, as one object or as the events of a stream."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import orjson

from services.common.errors import TokaError
from services.gateway.anthropic.content import ContentBlocks, Event
from services.gateway.anthropic.errors import in_own_words, to_body
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest
from services.gateway.openai.chat_shape import ChatShape, MakeReader
from services.gateway.openai.output.deltas import Content
from services.gateway.openai.transcript import Piece
from services.gateway.openai.usage import usage_of

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
PING_SECONDS = 10.0


class MessageShape(ChatShape):
    """The shape of ``/v1/messages``: a single answer as content blocks."""

    def __init__(
        self, prompt: PromptRequest, facts: ModelFacts, make_reader: MakeReader, *, max_tokens: int, omit_thinking: bool
    ) -> None:
        """Create the shape. ``max_tokens`` is the client's. The prompt's is smaller if the context ends earlier."""
        super().__init__(prompt.request_id, facts, None, make_reader=make_reader)
        self._prompt = prompt
        self._cut_by = "max_tokens" if prompt.max_tokens >= max_tokens else "model_context_window_exceeded"
        self._blocks = ContentBlocks(omit_thinking=omit_thinking)
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": facts.id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(prompt.prompt_ids), 0, 0),
        }

    def beginning(self) -> bytes:
        return _written([{"type": "message_start", "message": self._message}])

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        return _written(self._take(index, piece, last=reason is not None))

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        self._take(choice.index, piece, last=True)
        return b""

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        return orjson.dumps(self._message | {"content": self._blocks.blocks} | self._end(choices))

    def ending(self, choices: Sequence[ActiveSample]) -> bytes:
        end = self._end(choices)
        usage = end.pop("usage")
        return _written([{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}])

    def until_error(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return with_pings(events)

    def broken(self, error: TokaError) -> bytes:
        return _written([to_body(in_own_words(error), self.request_id)])

    def _take(self, index: int, piece: Piece, *, last: bool) -> list[Event]:
        deltas = self._readers.read(index, piece.text, last=last)
        if deltas is None:
            deltas = [Content(piece.text)] if piece.text else []
        events = self._blocks.push(deltas)
        return events + self._blocks.finish() if last else events

    def _end(self, choices: Sequence[ActiveSample]) -> dict[str, Any]:
        [choice] = choices
        reason, sequence = self._stop(choice)
        used = usage_of(choices)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        usage = _usage(used["prompt_tokens"] - cached, cached, used["completion_tokens"])
        usage["output_tokens_details"] = {"thinking_tokens": self._readers.reasoning_tokens}
        usage["timing"] = used["timing"]
        return {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}

    def _stop(self, choice: ActiveSample) -> tuple[str, str | None]:
        """Return ``stop_reason`` and ``stop_sequence``."""
        ending, reader = choice.outcome, self._readers[choice.index]
        if ending.reason == "length":
            return self._cut_by, None
        if ending.reason == "abort":
            return "pause_turn", None
        if ending.stop_string is not None:
            return "stop_sequence", self._prompt.settings.stop_strings[ending.stop_string]
        called = reader is not None and reader.call_count and not reader.in_call
        return "tool_use" if called else "end_turn", None


def _usage(computed: int, cached: int, output: int) -> dict[str, Any]:
    """Return ``usage``. ``computed`` is the number of prompt tokens that were not in the prefix cache."""
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "service_tier": "standard",
    }


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


async def with_pings(events: AsyncIterator[bytes], seconds: float = PING_SECONDS) -> AsyncIterator[bytes]:
    """Yield ``events``, and a ping after each ``seconds`` without an event.

    Pings keep proxies and clients from timing out.
    """
    pending: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            pending = asyncio.create_task(_next(events))
            while not (await asyncio.wait([pending], timeout=seconds))[0]:
                yield PING
            if (data := pending.result()) is None:
                return
            yield data
    finally:
        if pending is not None:
            pending.cancel()


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)
