"""The content blocks of a message, and the events that stream them."""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

import orjson
import pydantic_core

from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Delta

Event = dict[str, Any]  # with its type


class ContentBlocks:
    """The blocks of one message. The last one is open until another begins, or until ``finish``."""

    def __init__(self, *, omit_thinking: bool) -> None:
        """Create an empty message. If ``omit_thinking``, thinking blocks have no text."""
        self.blocks: list[dict[str, Any]] = []
        self._omit_thinking = omit_thinking
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []  # of the open block's text

    def push(self, deltas: Iterable[Delta]) -> list[Event]:
        """Append ``deltas`` and return their events."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallBegun):
                call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": delta.name, "input": {}}
                events += self._begin(call)
                continue
            kind = "tool_use" if isinstance(delta, Arguments) else "text" if isinstance(delta, Content) else "thinking"
            if self._open is None or self._open["type"] != kind:
                events += self._begin(_empty(kind))
            self._pieces.append(delta.text)
            if not (self._omit_thinking and kind == "thinking"):
                events.append(self._delta(kind, delta.text))
        return events

    def finish(self) -> list[Event]:
        """End the message and return the last events. A message without content gets an empty text block."""
        events = [] if self.blocks else self._begin(_empty("text"))
        return events + self._end()

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._end()
        self._open, self._pieces = block, []
        self.blocks.append(block)
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _end(self) -> list[Event]:
        block, text, events = self._open, "".join(self._pieces), []
        if block is None:
            return []
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block["thinking"] = "" if self._omit_thinking else text
            block["signature"] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._event("content_block_delta", delta=delta))
        self._open = None
        return [*events, self._event("content_block_stop")]

    def _delta(self, kind: str, text: str) -> Event:
        name, field = _DELTAS[kind]
        return self._event("content_block_delta", delta={"type": name, field: text})

    def _event(self, kind: str, **content: Any) -> Event:
        return {"type": kind, "index": len(self.blocks) - 1, **content}


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _empty(kind: str) -> dict[str, Any]:
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, or the complete part of truncated arguments.

    Arguments that are not an object become its only value, as Anthropic recommends for invalid JSON.
    """
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_partial=True)
        if isinstance(value, dict):
            orjson.dumps(value)  # rejects deep nesting and large numbers
            return value
    except (ValueError, TypeError):
        pass
    return {"INVALID_JSON": arguments}
