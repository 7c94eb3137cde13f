"""Conversations in the store: what a response goes on with, and what is kept of it."""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import structlog
from pydantic import TypeAdapter

from services.common.errors import AlreadyExists, FailedPrecondition, InvalidRequest, NotFound, TokaError
from services.gateway.batch.ids import new_id
from services.gateway.batch.responses import KeptResponse, Responses
from services.gateway.gateway import Gateway
from services.gateway.openai.messages import MAX_MESSAGES
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

# Of earlier turns, as JSON: each response keeps them again, so that a small request may not store much.
MAX_EARLIER_BYTES = 4 * 1024 * 1024
_PATIENCE_S = 10.0  # with a store that is busy: an answer waits so long

_ITEMS = TypeAdapter(list[Item])


@dataclass(frozen=True)
class Keeper:
    """Of one response. ``items``: the conversation that it answers, see ``KeptResponse``."""

    records: Responses
    items: bytes
    key_name: str

    async def keep(self, response: dict[str, Any]) -> bool:
        """Whether it is kept now: an answer that was computed is told in any case."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.records.keep(response, self.items, self.key_name)
        except AlreadyExists:
            return True  # by an earlier try of this request
        except (TokaError, TimeoutError) as error:
            log.warning("response not stored", id=response["id"], reason=str(error) or f"took {_PATIENCE_S:.0f} s")
            return False
        except Exception:
            log.exception("response not stored", id=response["id"])
            return False
        return True


async def with_conversation(
    gateway: Gateway, body: ResponsesBody, size: int, key_name: str
) -> tuple[ResponsesBody, Keeper | None]:
    """``body``, which was ``size`` bytes and comes from a caller with the API key ``key_name``, with its whole
    conversation as its input, and what keeps its response; None: nothing does.

    Raises ``InvalidRequest`` for a conversation, or a wish to be stored, that cannot be met.
    """
    earlier, keeping = None, None
    if body.previous_response_id is not None:
        records = await _records(gateway, "previous_response_id")
        try:
            earlier = await _to_its_end(records.get(body.previous_response_id, key_name))
        except NotFound as error:
            raise InvalidRequest(
                f"previous_response_id: {error.message}; send the conversation as input",
                field="previous_response_id",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
            ) from None
        size += earlier.size
    if body.store is not False:
        try:
            keeping = await _records(gateway, "store")
        except TokaError:
            if body.store:
                raise
    if earlier is not None:
        told, validated = await gateway.text.worked(size, _earlier, earlier, len(body.input))
    else:
        told, validated = [], []
    keeper = None
    if keeping is not None:
        keeper = Keeper(keeping, await gateway.text.worked(size, _to_keep, told, body.input), key_name)
    return body.model_copy(update={"input": [*validated, *body.input]}) if validated else body, keeper


def _earlier(kept: KeptResponse, new: int) -> tuple[list[dict[str, Any]], list[Item]]:
    """The turns up to ``kept`` and its output, for a request with ``new`` items: as they are listed, and checked."""
    if len(kept.items) > MAX_EARLIER_BYTES:
        raise _too_long(f"more than {MAX_EARLIER_BYTES} bytes")
    told = [*orjson.loads(kept.items), *map(_without_logprobs, orjson.loads(kept.body)["output"])]
    if kept.size > MAX_EARLIER_BYTES and len(orjson.dumps(told)) > MAX_EARLIER_BYTES:
        raise _too_long(f"more than {MAX_EARLIER_BYTES} bytes")
    if len(told) + new > MAX_MESSAGES:
        raise _too_long(f"{len(told)} items: at most {MAX_MESSAGES} with those of input")
    return told, _ITEMS.validate_python(told)


def _too_long(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"previous_response_id: the conversation up to it has {what}; begin a new one with what is still needed of it",
        field="previous_response_id",
        reason="INVALID_VALUE",
    )


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an output in a later conversation: they stay with the response, and are many times its text."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def _to_keep(told: Iterable[dict[str, Any]], given: Iterable[Any]) -> bytes:
    """JSON of the whole conversation, each item under an id that no other one has."""
    items: dict[str, dict[str, Any]] = {}
    for item in (*told, *map(_kept, given)):
        name = item["id"]
        if name in items:
            name = new_id(_PREFIXES[item["type"]])
        items[name] = item | {"id": name}
    return orjson.dumps(list(items.values()))


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
    kept: dict[str, Any]
    match item:
        case InputMessage(role=role):
            kind = "output_text" if role == "assistant" else "input_text"
            texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
            more: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
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
