"""The JSON of responses: whole, and as the typed events of a stream."""

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.generation import Choice
from services.gateway.openai.chat_shape import ChatShape, MakeReader
from services.gateway.openai.output.deltas import Content
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.responses.items import Event, OutputItems
from services.gateway.openai.usage import usage_of
from services.gateway.session.codec import ModelFacts


class ResponseShape(ChatShape):
    """``/v1/responses``: one answer, told as items."""

    def __init__(self, request_id: str, facts: ModelFacts, body: ResponsesBody, make_reader: MakeReader) -> None:
        super().__init__(request_id, facts, None, make_reader=make_reader)
        self._items = OutputItems()
        self._body = body
        self._events_told = 0

    def beginning(self):
        response = self._response("in_progress", None)
        return self._events([(f"response.{state}", {"response": response}) for state in ("created", "in_progress")])

    def opening(self, index):
        return b""

    def chunk(self, index, piece, reason):
        return self._events(self._take(index, piece.text, reason))

    def choice(self, choice, piece):
        self._take(choice.index, piece.text, choice.ending.reason)
        return b""

    def whole(self, choices, written):
        return orjson.dumps(self._ended(choices))

    def ending(self, choices):
        response = self._ended(choices)
        return self._events([(f"response.{response['status']}", {"response": response})])

    def _take(self, index: int, text: str, reason: str | None) -> list[Event]:
        deltas = self._readers.read(index, text, last=reason is not None)
        events = self._items.push(([Content(text)] if text else []) if deltas is None else deltas)
        return events if reason is None else events + self._items.finish(complete=reason != "length")

    def _events(self, events: Sequence[Event]) -> bytes:
        lines = []
        for kind, content in events:
            document = {"type": kind, "sequence_number": self._events_told, **content}
            self._events_told += 1
            lines.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))
        return b"".join(lines)

    def _ended(self, choices: Sequence[Choice]) -> dict[str, Any]:
        cut = choices[0].ending.reason == "length"
        usage = usage_of(choices)
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._readers.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        return self._response("incomplete" if cut else "completed", told)

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        choice = body.tool_choice or "auto"
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head["model"],
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }
