"""The stored conversation that a request continues, and the storage of its response."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson
import structlog
from pydantic import TypeAdapter

from services.common.errors import InvalidRequest, InvalidValue, NotFound, TokaError
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.messages import MAX_MESSAGES
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.responses.input_items import Item, ItemReference, all_stored, outputs, without_logprobs
from services.gateway.openai.responses.items import response_of
from services.gateway.openai.storing import opened_for, try_to_store
from services.gateway.store.background import finish_shielded
from services.gateway.store.conversations import Addition, Conversations
from services.gateway.store.responses import RUNNING, Responses

log = structlog.get_logger(__name__)

# Maximum size of the earlier turns as JSON. Each response stores a copy of them, so a small request could store much.
MAX_EARLIER_BYTES = 4 * 1024 * 1024
MAX_REFERENCED = 1024  # responses whose items one request may refer to

_ITEMS = TypeAdapter(list[Item])


@dataclass(frozen=True)
class Keeper:
    """Stores one response. ``items``: the conversation that it answers, see ``StoredResponse``."""

    records: Responses
    conversations: Conversations
    items: bytes
    key_name: str
    stores: bool = True  # False: only append to the conversation
    conversation_id: str | None = None
    added: Sequence[dict[str, Any]] = ()  # items of the input, to append to the conversation

    async def keep(self, response: dict[str, Any]) -> None:
        """Store ``response``. If that fails, set its ``store`` to false and its ``conversation`` to null.

        The client gets the response in any case.
        """
        if not await try_to_store("response", response["id"], self._keep(response)):
            response |= {"store": False, "conversation": None}

    def addition(self, response: dict[str, Any]) -> Addition | None:
        """Return the items that ``response`` adds to its conversation, or None if it failed or was cancelled."""
        if self.conversation_id is None or response["status"] not in ("completed", "incomplete"):
            return None
        return Addition(self.conversation_id, [*self.added, *map(without_logprobs, response["output"])])

    async def _keep(self, response: dict[str, Any]) -> None:
        addition = self.addition(response)
        try:
            if self.stores:
                await self.records.keep(response, self.items, self.key_name, addition)
            elif addition is not None:
                await self.conversations.append(addition, self.key_name)
        except NotFound:  # the conversation was deleted meanwhile
            log.info("response not added to its conversation, which was deleted", id=response["id"])
            response["conversation"] = None
            await replace(self, conversation_id=None)._keep(response)


class Earlier(NamedTuple):
    """The turns before the input of a request."""

    stored: list[dict[str, Any]]  # as JSON
    items: list[Any]  # the same, validated


async def with_conversation(
    gateway: Gateway, body: ResponsesBody, size: int, key_name: str, *, keeps: bool = True
) -> tuple[ResponsesBody, Keeper | None]:
    """Return ``body`` with its whole conversation as its input, and the keeper of its response if it is stored.

    ``size``: bytes of the body. ``key_name``: name of the caller's API key. ``keeps``: False if there will be no
    response. Raises ``InvalidRequest`` for a conversation that cannot be read, and for a response that cannot be
    stored.
    """
    earlier, size = await _earlier(gateway, body, size, key_name)
    body = await _without_references(gateway, body, earlier, key_name)
    keeper = await _keeper(gateway, body, earlier, size, key_name) if keeps else None
    if earlier.items:
        body = body.model_copy(update={"input": [*earlier.items, *body.input]})
    return body, keeper


async def _earlier(gateway: Gateway, body: ResponsesBody, size: int, key_name: str) -> tuple[Earlier, int]:
    """Return the turns before the input, and the size of the whole conversation in bytes."""
    field = "previous_response_id"
    if body.conversation_id is not None:
        field = "conversation"
        if body.previous_response_id is not None:
            raise InvalidValue("conversation: not with previous_response_id; send one of them", field=field)
        store = await opened_for(gateway, field)
        try:
            items = await finish_shielded(store.conversations.items(body.conversation_id, key_name))
        except NotFound as error:
            raise InvalidRequest(
                f"conversation: {error.message}", field=field, reason="CONVERSATION_NOT_FOUND"
            ) from None
        most = sum(map(len, items))
        stored = await gateway.text.worked(size + most, lambda: [orjson.loads(item) for item in items])
    elif body.previous_response_id is not None:
        store = await opened_for(gateway, field)
        try:
            kept = await finish_shielded(store.responses.get(body.previous_response_id, key_name, with_items=True))
        except NotFound as error:
            raise InvalidRequest(
                f"previous_response_id: {error.message}; send the conversation as input",
                field=field,
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
            ) from None
        if kept.status in RUNNING:
            raise InvalidRequest(
                f"previous_response_id: the response is {kept.status}; wait until it has ended",
                field=field,
                reason="PREVIOUS_RESPONSE_NOT_ENDED",
            )
        if len(kept.items) > MAX_EARLIER_BYTES:
            raise _too_long(field, f"more than {MAX_EARLIER_BYTES} bytes")
        most = len(kept.body) + len(kept.items)  # log-probabilities included
        stored = await gateway.text.worked(size + most, lambda: [*orjson.loads(kept.items), *outputs([kept.body])])
    else:
        return Earlier([], []), size
    size += most
    return await gateway.text.worked(size, _validated, stored, most, len(body.input), field), size


def _validated(stored: list[dict[str, Any]], most_bytes: int, new: int, field: str) -> Earlier:
    if most_bytes > MAX_EARLIER_BYTES and len(orjson.dumps(stored)) > MAX_EARLIER_BYTES:
        raise _too_long(field, f"more than {MAX_EARLIER_BYTES} bytes")
    if len(stored) + new > MAX_MESSAGES:
        raise _too_long(field, f"{len(stored)} items: at most {MAX_MESSAGES} with those of input")
    return Earlier(stored, _ITEMS.validate_python(stored))


def _too_long(field: str, size: str) -> InvalidRequest:
    return InvalidValue.at(
        field, f"the conversation before it has {size}; begin a new one with the items that are still needed"
    )


async def _without_references(gateway: Gateway, body: ResponsesBody, earlier: Earlier, key_name: str) -> ResponsesBody:
    """Return ``body`` with item references replaced by the items."""
    wanted = {item.id for item in body.input if isinstance(item, ItemReference)}
    if not wanted:
        return body
    store = await opened_for(gateway, "input")
    by_id = {item["id"]: item for item in earlier.stored if item["id"] in wanted}
    responses = {name for each in wanted - by_id.keys() if (name := response_of(each)) is not None}
    if len(responses) > MAX_REFERENCED:
        raise InvalidValue.at(
            "input", f"it refers to items of {len(responses)} responses: at most {MAX_REFERENCED}; send the items"
        )
    bodies = await finish_shielded(store.responses.bodies(responses, key_name, MAX_EARLIER_BYTES))
    by_id |= {item["id"]: item for item in await gateway.text.worked(sum(map(len, bodies)), outputs, bodies)}
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference) and item.id not in by_id:
            raise InvalidRequest.at(
                f"input[{index}]",
                f"there is no stored item {item.id[:100]!r}: its response was not stored, was deleted,"
                " or is older than 30 days; send the item itself",
                reason="ITEM_NOT_FOUND",
            )
    found = dict(zip(by_id, _ITEMS.validate_python(list(by_id.values())), strict=True))
    items = [found[item.id] if isinstance(item, ItemReference) else item for item in body.input]
    return body.model_copy(update={"input": items})


async def _keeper(gateway: Gateway, body: ResponsesBody, earlier: Earlier, size: int, key_name: str) -> Keeper | None:
    """Return the keeper of the response, or None if it is not stored. Raises ``InvalidRequest``."""
    store = None
    if body.store is not False or body.conversation_id is not None:
        try:
            store = await opened_for(gateway, "store")
        except TokaError:
            if body.store:
                raise
    if store is None:
        return None
    stored = await gateway.text.worked(size, all_stored, earlier.stored, body.input)
    items = await gateway.text.worked(size, orjson.dumps, stored)
    return Keeper(
        store.responses,
        store.conversations,
        items,
        key_name,
        body.store is not False,
        body.conversation_id,
        stored[len(earlier.stored) :],
    )
