"""The output items of a response, and the events that tell how they grow."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.openai.chat_shape import call_id
from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Delta

Event = tuple[str, dict[str, Any]]  # type, and what it holds beside


class OutputItems:
    """Those of one response. The last one is open until ``finish``, or until something of another kind comes."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}  # an item; empty: none is
        self._text = ""  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # beside it, of words for the user

    def push(self, deltas: Iterable[Delta], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take what is new. ``logprobs``: of the words for the user in it, as JSON."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallBegun):
                events += self._begin("function_call", {"call_id": call_id(), "name": delta.name, "arguments": ""})
                continue
            kind = _kind(delta)
            if self._open.get("type") != kind:
                events += self._begin(kind, _EMPTY[kind])
            self._text += delta.text
            new = logprobs if kind == "message" else ()
            self._logprobs += new
            said = self._told({"delta": delta.text}, new)
            events.append((f"response.{_STREAMS[kind]}.delta", self._place(part=True) | said))
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """The response is over. One without a word has an empty message."""
        events = [] if self.items else self._begin("message", _EMPTY["message"])
        return events + self._end("completed" if complete else "incomplete")

    def abandon(self) -> None:
        """The response has failed: what was open stays as it is."""
        self._end("incomplete")

    def _begin(self, kind: str, content: dict[str, Any]) -> list[Event]:
        events = self._end("completed")
        item = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **content}
        self.items.append(item)
        self._open, self._text, self._logprobs = item, "", []
        events.append(("response.output_item.added", self._place(item=dict(item))))
        if kind in _PARTS:
            events.append(("response.content_part.added", self._place(part=True) | {"part": _part(kind, "", [])}))
        return events

    def _end(self, status: str) -> list[Event]:
        item = self._open
        if not item:
            return []
        kind, text = item["type"], self._text
        item["status"] = status
        said = {"arguments": text, "name": item["name"]} if kind == "function_call" else {"text": text}
        events = [(f"response.{_STREAMS[kind]}.done", self._place(part=True) | self._told(said, self._logprobs))]
        if kind in _PARTS:
            part = _part(kind, text, self._logprobs)
            item["content"] = [part]
            events.append(("response.content_part.done", self._place(part=True) | {"part": part}))
        else:
            item["arguments"] = text
        events.append(("response.output_item.done", self._place(item=dict(item))))
        self._open = {}
        return events

    def _told(self, said: dict[str, Any], logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return said | ({"logprobs": logprobs} if self._open["type"] == "message" else {})

    def _place(self, item: dict[str, Any] | None = None, *, part: bool = False) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if part:
            place["item_id"] = self._open["id"]
            if self._open["type"] in _PARTS:
                place["content_index"] = 0
        return place if item is None else place | {"item": item}


_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_STREAMS = _PARTS | {"function_call": "function_call_arguments"}


def _kind(delta: Delta) -> str:
    if isinstance(delta, Arguments):
        return "function_call"
    return "message" if isinstance(delta, Content) else "reasoning"


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "message" else part
