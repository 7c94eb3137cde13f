"""``/v1/chat/completions/{id}``: read, list, change and delete stored chat completions."""

import re
from typing import Any

import orjson
from fastapi import Request, Response
from pydantic import Field

from services.common.errors import InvalidValue
from services.gateway.http.errors import response
from services.gateway.http.request import Posted, read_body, read_caller
from services.gateway.openai.body import Body
from services.gateway.openai.fields import MAX_METADATA, Metadata
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import AFTER, ORDER, Router, limit, parameters, takes
from services.gateway.store.chats import ChatFilter
from services.gateway.store.queries import Query
from services.gateway.store.service import opened
from services.gateway.store.shapes import page, page_of
from services.gateway.store.tables import StoredChat

MAX_PAGE = 100
_LABEL = re.compile(r"metadata\[(.+)\]")
_CHATS, _CHAT = "/v1/chat/completions", "/v1/chat/completions/{completion_id}"
_MODEL = {"name": "model", "in": "query", "schema": {"type": "string"}}

router = Router()


class ChatUpdateBody(Body):
    """``POST /v1/chat/completions/{id}``."""

    metadata: Metadata | None = Field(description="Replaces the stored metadata.")


@router.get(_CHATS, openapi_extra=parameters(AFTER, limit(MAX_PAGE), ORDER, _MODEL))
async def list_chats(request: Request) -> Response:
    """List stored chat completions, the oldest first."""
    query = Query(request)
    most, order = query.number("limit", 20, 1, MAX_PAGE), query.one_of("order", ("asc", "desc"))
    wanted = ChatFilter(query.text("model"), _labels(request))
    store = await opened(request)
    chats, has_more = await store.chats.page(
        read_caller(request).owner, wanted, after=query.text("after"), limit=most, newest_first=order == "desc"
    )
    return response(200, page([_chat_object(chat) for chat in chats], has_more))


@router.get(_CHAT)
async def get_chat(request: Request, completion_id: str) -> Response:
    """Return a stored chat completion."""
    store = await opened(request)
    return response(200, _chat_object(await store.chats.get(completion_id, read_caller(request).owner)))


@router.post(_CHAT, openapi_extra=takes(ChatUpdateBody.model_json_schema()))
async def update_chat(request: Request, completion_id: str) -> Response:
    """Replace the metadata of a stored chat completion."""
    gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    body = await parse_large(gateway.text, Posted(raw), ChatUpdateBody)
    store = await opened(request)
    chat = await store.chats.update(completion_id, body.metadata, read_caller(request).owner)
    return response(200, _chat_object(chat), ignored_header(body))


@router.delete(_CHAT)
async def delete_chat(request: Request, completion_id: str) -> Response:
    """Delete a stored chat completion."""
    await (await opened(request)).chats.delete(completion_id, read_caller(request).owner)
    return response(200, {"id": completion_id, "object": "chat.completion.deleted", "deleted": True})


@router.get(f"{_CHAT}/messages", openapi_extra=parameters(AFTER, limit(MAX_PAGE), ORDER))
async def list_chat_messages(request: Request, completion_id: str) -> Response:
    """List the messages that a stored chat completion answers, the first one first."""
    query = Query(request)
    most, order = query.number("limit", 20, 1, MAX_PAGE), query.one_of("order", ("asc", "desc"))
    stored = await (await opened(request)).chats.messages(completion_id, read_caller(request).owner)
    messages = await request.app.state.gateway.text.worked(len(stored), orjson.loads, stored)
    return response(200, page_of(messages, query, most, reverse=order == "desc"))


def _labels(request: Request) -> dict[str, str]:
    """Return the query parameters ``metadata[KEY]=VALUE``. Raises ``InvalidRequest``."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if (found := _LABEL.fullmatch(name)) is None:
            continue
        key = found[1]
        if any(sign in key for sign in '"\0') or "\0" in value or len(given) == MAX_METADATA:
            raise InvalidValue.at(
                "metadata", f"expected at most {MAX_METADATA} keys, without quotation marks and NUL characters"
            )
        given[key] = value
    return given


def _chat_object(chat: StoredChat) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(chat.body)
    return document | {"metadata": chat.labels or {}}
