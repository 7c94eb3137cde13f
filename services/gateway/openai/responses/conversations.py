"""``/v1/conversations``: conversations in the store, and their items."""

from typing import Annotated, Any

import orjson
from fastapi import Request, Response
from pydantic import Field

from services.common.errors import InvalidValue
from services.gateway.http.errors import response
from services.gateway.http.request import Posted, read_body, read_caller
from services.gateway.openai.body import Body, optional
from services.gateway.openai.fields import Metadata
from services.gateway.openai.parse import B, ignored_header, parse_large
from services.gateway.openai.responses.input_items import Item, ItemReference, all_stored
from services.gateway.openai.responses.routes import MAX_PAGE, check_include_query
from services.gateway.openai.router import AFTER, ORDER, Router, limit, parameters, takes
from services.gateway.store.queries import Query
from services.gateway.store.service import opened
from services.gateway.store.shapes import page
from services.gateway.store.tables import StoredConversation

MAX_ADDED = 20  # items of a request, as in OpenAI's API

Items = Annotated[list[Item], Field(max_length=MAX_ADDED)]
_CONVERSATION, _ITEMS = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"

router = Router()


class ConversationCreateBody(Body):
    """``POST /v1/conversations``."""

    items: Items | None = optional("At most 20 items, as in input, without references.")
    metadata: Metadata | None = optional("Returned in the conversation.")


class ConversationUpdateBody(Body):
    """``POST /v1/conversations/{id}``."""

    metadata: Metadata | None = Field(description="Replaces the stored metadata.")


class ConversationItemsBody(Body):
    """``POST /v1/conversations/{id}/items``."""

    items: Annotated[Items, Field(min_length=1, description="At most 20 items, as in input, without references.")]


@router.post("/v1/conversations", openapi_extra=takes(ConversationCreateBody.model_json_schema()))
async def create_conversation(request: Request) -> Response:
    """Create a conversation, with or without items."""
    body = await _read(request, ConversationCreateBody)
    store = await opened(request)
    items = all_stored((), _checked(body.items or []))
    conversation = await store.conversations.create(body.metadata, items, read_caller(request).owner)
    return response(200, _conversation_object(conversation), ignored_header(body))


@router.get(_CONVERSATION)
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """Return a conversation, without its items."""
    store = await opened(request)
    conversation = await store.conversations.get(conversation_id, read_caller(request).owner)
    return response(200, _conversation_object(conversation))


@router.post(_CONVERSATION, openapi_extra=takes(ConversationUpdateBody.model_json_schema()))
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace the metadata of a conversation."""
    body = await _read(request, ConversationUpdateBody)
    store = await opened(request)
    conversation = await store.conversations.update(conversation_id, body.metadata, read_caller(request).owner)
    return response(200, _conversation_object(conversation), ignored_header(body))


@router.delete(_CONVERSATION)
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Delete a conversation and its items, but not its responses."""
    await (await opened(request)).conversations.delete(conversation_id, read_caller(request).owner)
    return response(200, {"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(_ITEMS, openapi_extra=takes(ConversationItemsBody.model_json_schema()))
async def create_items(request: Request, conversation_id: str) -> Response:
    """Append items to a conversation."""
    body = await _read(request, ConversationItemsBody)
    check_include_query(request)
    store = await opened(request)
    items = all_stored((), _checked(body.items))
    added = await store.conversations.add(conversation_id, items, read_caller(request).owner)
    return response(200, page(added, False), ignored_header(body))


@router.get(_ITEMS, openapi_extra=parameters(AFTER, limit(MAX_PAGE), ORDER))
async def list_items(request: Request, conversation_id: str) -> Response:
    """List the items of a conversation, the last one first."""
    query = Query(request)
    most, order = query.number("limit", 20, 1, MAX_PAGE), query.one_of("order", ("desc", "asc"))
    check_include_query(request)
    items, has_more = await (await opened(request)).conversations.page(
        conversation_id,
        read_caller(request).owner,
        after=query.text("after"),
        limit=most,
        newest_first=order == "desc",
    )
    return response(200, page([orjson.loads(item) for item in items], has_more))


@router.get(f"{_ITEMS}/{{item_id}}")
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Return an item of a conversation."""
    check_include_query(request)
    store = await opened(request)
    item = await store.conversations.item(conversation_id, item_id, read_caller(request).owner)
    return Response(item, media_type="application/json")


@router.delete(f"{_ITEMS}/{{item_id}}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Delete an item of a conversation. Returns the conversation."""
    store = await opened(request)
    conversation = await store.conversations.delete_item(conversation_id, item_id, read_caller(request).owner)
    return response(200, _conversation_object(conversation))


async def _read(request: Request, kind: type[B]) -> B:
    gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    return await parse_large(gateway.text, Posted(raw or b"{}"), kind)


def _checked(items: list[Any]) -> list[Any]:
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            raise InvalidValue.at(
                f"items[{index}]", "a conversation holds items, not references to them; send the item itself"
            )
    return items


def _conversation_object(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.labels or {},
    }
