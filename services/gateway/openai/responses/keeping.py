"""Conversations in the store: what a response goes on with, and what is kept of it."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from pydantic import TypeAdapter

from services.common.errors import FailedPrecondition, InvalidRequest, NotFound, TokaError
from services.gateway.batch.ids import new_id
from services.gateway.batch.responses import Responses
from services.gateway.gateway import Gateway
from services.gateway.openai.responses.body import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    Item,
    ResponsesBody,
)

log = structlog.get_logger(__name__)

R = TypeVar("R")

_PATIENCE_S = 10.0  # with a store that is busy: an answer waits so long

_ITEMS = TypeAdapter(list[Item])


@dataclass(frozen=True)
class Keeper:
    """Of one response. ``items``: the conversation that it answers."""

    records: Responses
    items: list[dict[str, Any]]

    async def keep(self, response: dict[str, Any]) -> bool:
        """Whether it is kept now: an answer that was computed is told in any case."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.records.keep(response, self.items)
        except (TokaError, TimeoutError) as error:
            log.warning("response not stored", id=response["id"], reason=str(error) or f"took {_PATIENCE_S:.0f} s")
            return False
        return True


async def with_conversation(gateway: Gateway, body: ResponsesBody) -> tuple[ResponsesBody, Keeper | None]:
    """``body`` with its whole conversation as its input, and what keeps its response; None: nothing does.

    Raises ``InvalidRequest`` for a conversation, or a wish to be stored, that cannot be met.
    """
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        records = await _records(gateway, "previous_response_id")
        try:
            earlier = (await _to_its_end(records.get(body.previous_response_id))).conversation
        except NotFound as error:
            raise InvalidRequest(
                f"previous_response_id: {error.message}; send the conversation as input",
                field="previous_response_id",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
            ) from None
    keeper = None
    if body.store is not False:
        try:
            records = await _records(gateway, "store")
            keeper = Keeper(records, [*earlier, *map(_kept, body.input)])
        except TokaError:
            if body.store:
                raise
    if earlier:
        body = body.model_copy(update={"input": [*_ITEMS.validate_python(earlier), *body.input]})
    return body, keeper


async def _records(gateway: Gateway, field: str) -> Responses:
    try:
        return (await gateway.batches.opened()).responses
    except NotFound as error:  # and there never will be
        raise InvalidRequest(f"{field}: {error.message}", field=field, reason="UNSUPPORTED_PARAMETER") from None


async def _to_its_end(work: Coroutine[Any, Any, R]) -> R:
    """``work``, which goes on when a client leaves: a transaction is not cut in the middle."""
    return await asyncio.shield(asyncio.create_task(work))


def _kept(item: Any) -> dict[str, Any]:
    """An item of the input as it is listed, under its own id or a new one."""
    match item:
        case InputMessage(role=role):
            kind = "output_text" if role == "assistant" else "input_text"
            texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
            more = {"annotations": []} if role == "assistant" else {}
            parts = [{"type": kind, "text": text, **more} for text in texts]
            kept = {"type": "message", "status": "completed", "role": role, "content": parts}
        case InputCall():
            kept = {"type": item.type, "status": "completed", "call_id": item.call_id, "name": item.name}
            kept["arguments"] = item.arguments
        case InputCallOutput():
            output = item.output if isinstance(item.output, str) else [_dumped(part) for part in item.output]
            kept = {"type": item.type, "status": "completed", "call_id": item.call_id, "output": output}
        case InputReasoning():
            kept = {"type": item.type, "summary": [_dumped(part) for part in item.summary or ()]}
            if item.content is not None:
                kept["content"] = [_dumped(part) for part in item.content]
        case _:
            raise FailedPrecondition(f"an item of type {item.type!r} cannot be stored; send store=false")
    given = (item.model_extra or {}).get("id")
    return {"id": given if isinstance(given, str) and given else new_id(_PREFIXES[kept["type"]]), **kept}


_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def _dumped(part: Any) -> dict[str, Any]:
    return {"type": part.type, "text": part.text}
