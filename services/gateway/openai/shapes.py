"""The JSON of answers: completions and chat, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import orjson

from services.gateway.generation import Choice
from services.gateway.openai.logprobs import TokenText, chat_content, completion_logprobs
from services.gateway.openai.sse import Template, event
from services.gateway.openai.transcript import Piece, TokenEntry
from services.gateway.openai.usage import usage_of
from services.gateway.session.codec import ModelFacts


class Shape(ABC):
    """How one request's answer is written. ``token_text`` is set when logprobs were asked for."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, request_id: str, facts: ModelFacts, token_text: TokenText | None, *, include_usage: bool = False
    ) -> None:
        self.request_id = request_id
        self._token_text = token_text
        self._include_usage = include_usage
        self._head = {
            "id": request_id,
            "object": self.whole_object,
            "created": int(time.time()),
            "model": facts.id,
            "system_fingerprint": f"fp_{facts.tokenizer_fingerprint[:12]}",
        }

    @cached_property
    def _template(self) -> Template:
        return Template(self._chunk_head, "choices", {"usage": None} if self._include_usage else None)

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object}

    def whole(self, choices: Sequence[Choice], written: Sequence[bytes]) -> bytes:
        """The body of an answer that is not streamed. ``written``: what ``choice`` made of each."""
        fragments = [orjson.Fragment(text) for text in written]
        return orjson.dumps(self._head | {"choices": fragments, "usage": usage_of(choices)})

    def opening(self, index: int) -> bytes:
        """What comes before the first chunk of a choice."""
        return b""

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        """A chunk with new text, and the finish reason in the last one of its choice."""
        logprobs = orjson.dumps(self._logprobs(piece.entries)) if piece.entries else b"null"
        finish = b"null" if reason is None else b'"%b"' % reason.encode()
        return self._template.fill(self._chunk_choice(index, piece.text, logprobs, finish, reason is not None))

    def usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        """The chunk after the last, when ``stream_options.include_usage`` asked for it."""
        if not self._include_usage:
            return b""
        return event(self._chunk_head | {"choices": [], "usage": usage_of(choices)})

    def choice(self, choice: Choice, piece: Piece) -> bytes:
        """One whole choice as JSON."""
        logprobs = None if self._token_text is None else self._logprobs(piece.entries)
        content = self._content(piece.text)
        return orjson.dumps(
            {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.ending.reason}
        )

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """What a whole choice holds its text in."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """``logprobs`` of a choice."""

    @abstractmethod
    def _chunk_choice(self, index: int, text: str, logprobs: bytes, finish: bytes, last: bool) -> bytes:
        """``choices`` of a chunk, as JSON."""


class CompletionShape(Shape):
    """``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _content(self, text):
        return {"text": text}

    def _logprobs(self, entries):
        return completion_logprobs(entries, self._token_text)

    def _chunk_choice(self, index, text, logprobs, finish, last):
        parts = (index, orjson.dumps(text), logprobs, finish)
        return b'[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]' % parts


class ChatShape(Shape):
    """``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index):
        delta = b'[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._template.fill(delta % index)

    def _content(self, text):
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, entries):
        return {"content": chat_content(entries, self._token_text), "refusal": None}

    def _chunk_choice(self, index, text, logprobs, finish, last):
        delta = b"{}" if last and not text else b'{"content":%b}' % orjson.dumps(text)
        return b'[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]' % (index, delta, logprobs, finish)
