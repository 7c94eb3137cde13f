"""Which paths of stored responses, conversations and chat completions lead where, for the application."""

from typing import Any

from fastapi import FastAPI

from services.gateway.openai import stored_chats as chats
from services.gateway.openai.body import Body
from services.gateway.openai.responses import conversations, stored_routes

_RESPONSE, _CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
_CHATS, _CHAT = "/v1/chat/completions", "/v1/chat/completions/{completion_id}"
_STRING = {"type": "string"}
_LIST = (
    {"name": "after", "in": "query", "schema": _STRING},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": chats.MAX_PAGE}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
)
_FOLLOW = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
)
_CHATS_LIKE = (*_LIST, {"name": "model", "in": "query", "schema": _STRING})


def add_stored_routes(api: FastAPI) -> None:
    """Add all of them, with their documentation."""
    for path, show, parameters in (
        (_RESPONSE, stored_routes.get_response, _FOLLOW),
        (f"{_RESPONSE}/input_items", stored_routes.list_input_items, _LIST),
        (_CONVERSATION, conversations.get_conversation, ()),
        (f"{_CONVERSATION}/items", conversations.list_items, _LIST),
        (f"{_CONVERSATION}/items/{{item_id}}", conversations.get_item, ()),
        (_CHATS, chats.list_chats, _CHATS_LIKE),
        (_CHAT, chats.get_chat, ()),
        (f"{_CHAT}/messages", chats.list_chat_messages, _LIST),
    ):
        more = {"parameters": [*parameters]} if parameters else None
        api.add_api_route(path, show, methods=["GET"], response_model=None, openapi_extra=more)
        api.add_api_route(path, show, methods=["HEAD"], response_model=None, include_in_schema=False)
    for path, remove in (
        (_RESPONSE, stored_routes.delete_response),
        (_CONVERSATION, conversations.delete_conversation),
        (f"{_CONVERSATION}/items/{{item_id}}", conversations.delete_item),
        (_CHAT, chats.delete_chat),
    ):
        api.add_api_route(path, remove, methods=["DELETE"], response_model=None)
    api.add_api_route(f"{_RESPONSE}/cancel", stored_routes.cancel_response, methods=["POST"], response_model=None)
    _add_change(api, "/v1/conversations", conversations.create_conversation, conversations.ConversationCreateBody)
    _add_change(api, _CONVERSATION, conversations.update_conversation, conversations.ConversationUpdateBody)
    _add_change(api, f"{_CONVERSATION}/items", conversations.create_items, conversations.ConversationItemsBody)
    _add_change(api, _CHAT, chats.update_chat, chats.ChatUpdateBody)


def _add_change(api: FastAPI, path: str, change: Any, body: type[Body]) -> None:
    schema = {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}
    api.add_api_route(path, change, methods=["POST"], response_model=None, openapi_extra={"requestBody": schema})
