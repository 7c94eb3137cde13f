"""The output items of a response, and the stream events of their changes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.openai.chat_shape import call_id
from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Delta
from services.gateway.openai.responses.input_items import sealed
from services.gateway.openai.responses.tools import (
    CALLS,
    CUSTOM_CALL,
    FUNCTION_CALL,
    SHELL_CALL,
    Offered,
    call_content,
)

Event = tuple[str, dict[str, Any]]  # type, and the other members

_ID_DIGITS = 32  # of a response's id, after its prefix


class OutputItems:
    """The output items of one response. The last item is open until ``finish``, or until another kind of item begins.

    The id of an item contains the id of its response. ``response_of`` finds the response of an item with it.
    """

    def __init__(self, response_id: str, tools: Mapping[str, Offered], *, encrypted: bool = False) -> None:
        """Create the items. ``tools``: by the model's name. ``encrypted``: reasoning has ``encrypted_content``."""
        self.items: list[dict[str, Any]] = []
        self._name = response_id.rpartition("_")[2]
        self._tools = tools
        self._encrypted = encrypted
        self._open: dict[str, Any] = {}  # the open item; empty if there is none
        self._text = ""  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of the open item, if it is a message

    def push(self, deltas: Iterable[Delta], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Append ``deltas`` to the items, and return the events. ``logprobs``: of the messages in it, as JSON."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallBegun):
                events += self._begin_call(delta.name)
                continue
            kind = self._kind(delta)
            if self._open.get("type") != kind:
                events += self._begin(kind, _EMPTY[kind])
            self._text += delta.text
            new = logprobs if kind == "message" else ()
            self._logprobs += new
            if kind in _STREAMS:
                events.append(self._delta(delta.text, new))
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """End the response, and return the events. A response without items gets an empty message."""
        events = [] if self.items else self._begin("message", _EMPTY["message"])
        return events + self._end("completed" if complete else "incomplete")

    def replay(self, items: Iterable[dict[str, Any]]) -> list[Event]:
        """Append ``items``, which have ended, and return their events. The whole text of an item is one delta."""
        events: list[Event] = []
        for item in items:
            kind = item["type"]
            begun = item | (_EMPTY.get(kind) or call_content(kind, "", complete=False)) | {"status": "in_progress"}
            begun.pop("encrypted_content", None)
            events += self._append(item, begun)
            part: dict[str, Any] = item["content"][0] if kind in _PARTS else {"text": item.get("arguments")}
            if part["text"]:
                events.append(self._delta(part["text"], part.get("logprobs", [])))
            events += self._events_of_end()
        return events

    def abandon(self) -> None:
        """End a response that has failed or was cancelled, with its open item as it is."""
        self._end("incomplete")

    def _begin_call(self, name: str) -> list[Event]:
        tool = self._tools.get(name) or Offered("function", name)
        kind = CALLS[tool.kind]
        named = {} if kind == SHELL_CALL else {"name": tool.name}
        if tool.namespace:
            named["namespace"] = tool.namespace
        return self._begin(kind, {"call_id": call_id(), **named, **call_content(kind, "", complete=False)})

    def _begin(self, kind: str, content: dict[str, Any]) -> list[Event]:
        events = self._end("completed")
        name = f"{_PREFIXES[kind]}_{self._name}{len(self.items):04x}"
        item = {"id": name, "type": kind, "status": "in_progress", **content}
        self._text, self._logprobs = "", []
        return events + self._append(item, dict(item))

    def _append(self, item: dict[str, Any], begun: dict[str, Any]) -> list[Event]:
        """Append ``item``, and return the events of its beginning. ``begun``: the item without its text."""
        self.items.append(item)
        self._open = item
        events: list[Event] = [("response.output_item.added", self._position() | {"item": begun})]
        if (kind := item["type"]) in _PARTS:
            events.append(("response.content_part.added", self._position(part=True) | {"part": _part(kind, "", [])}))
        return events

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        content = self._with_logprobs({"delta": text}, logprobs)
        return f"response.{_STREAMS[self._open['type']]}.delta", self._position(part=True) | content

    def _end(self, status: str) -> list[Event]:
        item = self._open
        if not item:
            return []
        kind, text = item["type"], self._text
        item["status"] = status
        if kind in _PARTS:
            item["content"] = [_part(kind, text, self._logprobs)]
        else:
            item |= call_content(kind, text, complete=status == "completed")
        if kind == "reasoning" and self._encrypted:
            item["encrypted_content"] = sealed(text)
        return self._events_of_end()

    def _events_of_end(self) -> list[Event]:
        """Return the last events of the open item, which has its whole content. No item is open afterwards."""
        item = self._open
        events: list[Event] = []
        if (kind := item["type"]) in _PARTS:
            [part] = item["content"]
            content = self._with_logprobs({"text": part["text"]}, part.get("logprobs", []))
            events.append((f"response.{_PARTS[kind]}.done", self._position(part=True) | content))
            events.append(("response.content_part.done", self._position(part=True) | {"part": part}))
        else:
            events += self._end_of_call(item)
        events.append(("response.output_item.done", self._position() | {"item": dict(item)}))
        self._open = {}
        return events

    def _end_of_call(self, item: dict[str, Any]) -> list[Event]:
        """Return the last events of a call.

        The input of a custom tool is a string in the model's JSON, and is not sent before the JSON is complete.
        """
        position = self._position(part=True)
        if item["type"] == FUNCTION_CALL:
            content = {"arguments": item["arguments"], "name": item["name"]}
            return [("response.function_call_arguments.done", position | content)]
        if item["type"] == CUSTOM_CALL:
            stream, text = "response.custom_tool_call_input", item["input"]
            return [(f"{stream}.delta", position | {"delta": text}), (f"{stream}.done", position | {"input": text})]
        return []

    def _kind(self, delta: Delta) -> str:
        if isinstance(delta, Arguments):
            return str(self._open["type"])
        return "message" if isinstance(delta, Content) else "reasoning"

    def _with_logprobs(self, content: dict[str, Any], logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return content | ({"logprobs": logprobs} if self._open["type"] == "message" else {})

    def _position(self, *, part: bool = False) -> dict[str, Any]:
        """Return the members of an event that identify the last item, or with ``part`` its only part."""
        position: dict[str, Any] = {"output_index": len(self.items) - 1}
        if part:
            position["item_id"] = self._open["id"]
            if self._open["type"] in _PARTS:
                position["content_index"] = 0
        return position


def written(events: Iterable[Event], first: int) -> bytes:
    """Return ``events`` as server-sent events. ``first``: sequence number of the first event."""
    lines = []
    for number, (kind, content) in enumerate(events, first):
        document = {"type": kind, "sequence_number": number, **content}
        lines.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))
    return b"".join(lines)


def response_of(item_id: str) -> str | None:
    """Return the id of the response that has the output item ``item_id``, or None if it is not the id of one."""
    prefix, _, name = item_id.rpartition("_")
    if prefix not in _PREFIXES.values() or len(name) <= _ID_DIGITS:
        return None
    return f"resp_{name[:_ID_DIGITS]}"


_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
}
_PREFIXES = {"message": "msg", "reasoning": "rs", FUNCTION_CALL: "fc", CUSTOM_CALL: "ctc", SHELL_CALL: "lsh"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_STREAMS = _PARTS | {FUNCTION_CALL: "function_call_arguments"}  # items whose text is streamed


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "message" else part
