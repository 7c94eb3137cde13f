"""The JSON of chat completions: content, reasoning and tool calls, as one object or in chunks."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from services.common.text.vocabulary import TokenIds
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import ModelFacts
from services.gateway.openai.logprobs import TokenText, chat_content
from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Delta, Parts, ReasoningDelta, parts_of
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.shapes import Shape
from services.gateway.openai.transcript import Piece, TokenEntry

_EMPTY = Piece("", [])

MakeReader = Callable[[], OutputReader | None]


class Readers(defaultdict[int, OutputReader | None]):
    """The reader of each choice, made at its first tokens. A choice has no reader if all its text is content."""

    def add_tokens(self, index: int, token_ids: TokenIds) -> None:
        """Count the next tokens of a choice. Their text may be held back for a later piece."""
        if (reader := self[index]) is not None:
            reader.count(token_ids)

    def read(self, index: int, text: str, *, last: bool) -> list[Delta] | None:
        """Return the deltas of a choice's next ``text``, which may be its ``last``, or None if it has no reader."""
        reader = self[index]
        if reader is None:
            return None
        deltas = reader.push(text)
        return deltas + reader.finish() if last else deltas

    def reason(self, index: int, reason: str) -> str:
        """Return the finish reason of a choice. A model that stops after a call that it chose waits for its result."""
        reader = self[index]
        called = reader is not None and reader.call_count and not reader.named and not reader.in_call
        return "tool_calls" if reason == "stop" and called else reason

    def in_call(self, index: int) -> bool:
        """Return whether the text of a choice ends within the arguments of a call."""
        reader = self[index]
        return reader is not None and reader.in_call

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens in the reasoning of all choices."""
        return sum(reader.reasoning_tokens for reader in self.values() if reader is not None)


class ChatShape(Shape):
    """The shape of ``/v1/chat/completions``. ``make_reader`` returns the reader of one choice, or None."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request_id: str,
        facts: ModelFacts,
        token_text: TokenText | None,
        *,
        include_usage: bool = False,
        running_usage: bool = False,
        make_reader: MakeReader = lambda: None,
    ) -> None:
        super().__init__(request_id, facts, token_text, include_usage=include_usage, running_usage=running_usage)
        self._readers = Readers(make_reader)
        self._calls: dict[int, int] = {}  # index of the last call, by choice
        self._call_ids: defaultdict[tuple[int, int], str] = defaultdict(call_id)  # by choice and index

    def opening(self, index: int) -> bytes:
        delta = b'[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        if self._unsent_prompt_ids:
            self._unsent_prompt_ids.clear()
            return self._fill(self._template_with(self._whole_extras()), index, delta % index)
        return self._fill(self._template, index, delta % index)

    def add_tokens(self, index: int, token_ids: TokenIds, *, without_text: int = 0) -> None:
        super().add_tokens(index, token_ids, without_text=without_text)
        self._readers.add_tokens(index, token_ids)

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        deltas = self._readers.read(index, piece.text, last=reason is not None)
        if deltas is None:
            return super().chunk(index, piece, reason)
        contents = [b'"delta":' + orjson.dumps(self._delta(index, delta)) for delta in deltas]
        if reason is not None:
            contents.append(b'"delta":{}')
            reason = self._readers.reason(index, reason)
        elif not contents and (piece.entries or piece.token_ids):
            contents.append(self._chunk_content("", False))
        later = _EMPTY._replace(
            stop_reason=piece.stop_reason, weights=piece.weights, routed_experts=piece.routed_experts
        )
        pieces = [piece] + [later] * (len(contents) - 1)
        reasons = [None] * (len(contents) - 1) + [reason]
        return b"".join(map(self._chunk, [index] * len(contents), contents, pieces, reasons))

    def _whole_extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {"prompt_token_ids": self._prompt_ids[0]} if self._prompt_ids else {}
        return extras if self._prompt_logprobs is None else extras | {"prompt_logprobs": self._prompt_logprobs}

    def _usage(self, choices: Sequence[ActiveSample]) -> dict[str, Any]:
        usage = super()._usage(choices)
        if reasoning := self._readers.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _content(self, choice: ActiveSample, text: str) -> tuple[dict[str, Any], str]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        deltas = self._readers.read(choice.index, text, last=True)
        if deltas is not None:
            message |= self._message_of(choice.index, parts_of(deltas))
        return {"message": message}, self._readers.reason(choice.index, choice.outcome.reason)

    def _logprobs(self, entries: Sequence[TokenEntry], token_text: TokenText) -> dict[str, Any]:
        return {"content": chat_content(entries, token_text), "refusal": None}

    def _chunk_content(self, text: str, last: bool) -> bytes:
        return b'"delta":{}' if last and not text else b'"delta":{"content":%b}' % orjson.dumps(text)

    def _delta(self, index: int, delta: Delta) -> dict[str, Any]:
        match delta:
            case Content(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallBegun(name):
                number = self._calls[index] = self._calls.get(index, -1) + 1
                return {"tool_calls": [{"index": number, **self._call(index, number, name, "")}]}
            case Arguments(text):
                return {"tool_calls": [{"index": self._calls[index], "function": {"arguments": text}}]}

    def _message_of(self, index: int, parts: Parts) -> dict[str, Any]:
        message: dict[str, Any] = {"content": parts.content}
        if parts.calls:
            calls = enumerate(parts.calls)
            message["content"] = parts.content or None
            message["tool_calls"] = [self._call(index, number, call.name, call.arguments) for number, call in calls]
        if parts.reasoning:
            message["reasoning_content"] = message["reasoning"] = parts.reasoning
        return message

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": self._call_ids[index, number], "type": "function", "function": function}


def call_id() -> str:
    """Return a new id for a tool call. The message with the call's result refers to it."""
    return f"call_{secrets.token_hex(12)}"
