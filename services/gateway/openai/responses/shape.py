"""The JSON of responses, as one object or as the typed events of a stream."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import orjson

from services.common.errors import InvalidRequest, Overloaded, TokaError
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import ModelFacts
from services.gateway.openai.chat_shape import ChatShape, MakeReader
from services.gateway.openai.logprobs import TokenText, chat_content
from services.gateway.openai.output.deltas import Content, Delta
from services.gateway.openai.responses.attribution import Attribution
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.responses.items import Event, OutputItems, written
from services.gateway.openai.responses.keeping import Keeper
from services.gateway.openai.responses.tools import HostedTool, offered
from services.gateway.openai.transcript import Piece
from services.gateway.openai.usage import usage_of

# Finish reasons that cut an answer, and the reasons in ``incomplete_details``.
_CUT_BY = {"length": "max_output_tokens", "abort": "abort"}


class ResponseShape(ChatShape):
    """The shape of ``/v1/responses``: one answer as items."""

    def __init__(
        self,
        request_id: str,
        facts: ModelFacts,
        body: ResponsesBody,
        make_reader: MakeReader,
        token_text: TokenText | None,
        keeper: Keeper | None,
        response_id: str,
    ) -> None:
        """Create the shape.

        ``request_id`` is for schedulers and logs. ``response_id`` is only for the client, since it gives access to the
        stored response. ``keeper`` stores the response, if it is stored.
        """
        super().__init__(request_id, facts, token_text, make_reader=make_reader)
        self._id = response_id
        tools = offered(body.tools or ())
        self._items = OutputItems(response_id, tools, encrypted=body.wants_encrypted_reasoning)
        self._body = body
        self._queued = bool(body.background)  # until the first output
        self._keeper = keeper
        self._attribution: Attribution | None = None
        self._ended: dict[str, Any] = {}  # the final response. Empty before its end
        self._event_count = 0

    @property
    def queued(self) -> bool:
        """True if a background response has no output yet."""
        return self._queued

    @property
    def ended(self) -> bool:
        """True if the response is complete or has failed."""
        return bool(self._ended)

    def keep_with(self, keeper: Keeper) -> None:
        """Let ``keeper`` store the response."""
        self._keeper = keeper

    def snapshot(self) -> dict[str, Any]:
        """Return the current state of a response that has not ended."""
        return self._response("queued" if self._queued else "in_progress", None)

    def beginning(self) -> bytes:
        response = self.snapshot()
        states = ("created", response["status"])
        return self._events([(f"response.{state}", {"response": response}) for state in states])

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        if not self._queued:
            return self._events(self._take(index, piece, reason))
        self._queued = False
        begun = self._events([("response.in_progress", {"response": self.snapshot()})])
        return begun + self._events(self._take(index, piece, reason))

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        self._take(choice.index, piece, choice.outcome.reason)
        return b""

    async def settle(self, choices: Sequence[ActiveSample]) -> None:
        why = _CUT_BY.get(choices[0].outcome.reason)
        response = self._response("incomplete" if why else "completed", self._usage(choices))
        response["incomplete_details"] = {"reason": why} if why else None
        await self._end(response)

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        return orjson.dumps(self._ended)

    def ending(self, choices: Sequence[ActiveSample]) -> bytes:
        return self._last_event()

    async def until_error(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for data in events:
                yield data
        except TokaError as error:
            self._items.abandon()
            failed = self._response("failed", None)
            failed["error"] = {"code": _code(error), "message": error.message}
            await self._end(failed)
            yield self._last_event()

    async def _end(self, response: dict[str, Any]) -> None:
        if self._keeper is not None:
            await self._keeper.keep(response)
        self._ended = response

    def _last_event(self) -> bytes:
        return self._events([(f"response.{self._ended['status']}", {"response": self._ended})])

    def _take(self, index: int, piece: Piece, reason: str | None) -> list[Event]:
        events: list[Event] = []
        for deltas, logprobs in self._read(index, piece, last=reason is not None):
            events += self._items.push(deltas, logprobs)
        if reason is None:
            return events
        return events + self._items.finish(complete=reason not in _CUT_BY and not self._readers.in_call(index))

    def _read(self, index: int, piece: Piece, *, last: bool) -> Iterable[tuple[Iterable[Delta], list[dict[str, Any]]]]:
        text = piece.text
        logprobs = [] if self._token_text is None else chat_content(piece.entries, self._token_text)
        reader = self._readers[index]
        if reader is None:
            return [([Content(text)], logprobs)] if text or logprobs else []
        if self._token_text is None:
            return [(self._readers.read(index, text, last=last) or (), [])]
        self._attribution = self._attribution or Attribution(reader)
        return self._attribution.read(text, piece.entries, logprobs, last=last)

    def _events(self, events: Sequence[Event]) -> bytes:
        first = self._event_count
        self._event_count += len(events)
        return written(events, first)

    def _usage(self, choices: Sequence[ActiveSample]) -> dict[str, Any]:
        usage = usage_of(choices)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._readers.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
            "timing": usage["timing"],
        }

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": bool(body.background),
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head["model"],
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": _reasoning(body),
            "store": self._keeper is not None and self._keeper.stores,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or () if not isinstance(tool, HostedTool)],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }


def replayed(body: bytes) -> bytes:
    """Return the events of a stream that ends with the stored response ``body``. Each text is one delta."""
    response = orjson.loads(body)
    begun = response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[Event] = [(f"response.{state}", {"response": begun}) for state in ("created", "in_progress")]
    events += OutputItems(response["id"], {}).replay(response["output"])
    events.append((f"response.{response['status']}", {"response": response}))
    return written(events, 0)


def _code(error: TokaError) -> str:
    """Return the code of OpenAI's API for ``error``."""
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"


def _reasoning(body: ResponsesBody) -> dict[str, Any]:
    given = body.reasoning
    return {"effort": given.effort if given else None, "summary": given.summary if given else None}


def _format(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
