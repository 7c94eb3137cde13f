"""``/v1/responses``: create responses, count their input, and read, cancel and delete stored responses."""

import re

import orjson
from fastapi import Request, Response

from services.common.errors import InvalidRequest, InvalidValue, NotFound
from services.gateway.engine.text import INLINE_BYTES
from services.gateway.http.errors import response
from services.gateway.http.idempotency import fingerprint
from services.gateway.http.request import Caller, Posted, read_caller
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat import ask
from services.gateway.openai.conversation import check_tools
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.responses.body import InputTokensBody, ResponsesBody, check_includes
from services.gateway.openai.responses.in_background import respond_in_background
from services.gateway.openai.responses.keeping import with_conversation
from services.gateway.openai.responses.shape import ResponseShape, replayed
from services.gateway.openai.router import AFTER, ORDER, Router, limit, parameters
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.sse import EventStream
from services.gateway.openai.truncation import render_prompt
from services.gateway.store.ids import new_id
from services.gateway.store.queries import Query
from services.gateway.store.service import NO_STORE, OpenStore, opened
from services.gateway.store.shapes import page_of
from services.gateway.store.tables import FAILED

CREATE = "/v1/responses"
MAX_PAGE = 100
_MOST_EVENTS = 2**31 - 2
_RESPONSE = "/v1/responses/{response_id}"
_STREAM = {"name": "stream", "in": "query", "schema": {"type": "boolean"}}
_STARTING_AFTER = {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}}
_INLINE_ITEMS = 512  # maximum number of items that are translated on the event loop
# Parameters of chat completions, and the parameters that replace them here.
_PARAMETERS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
# Names that occur in messages only as parameters. "messages" is also a word.
_RENAMED = re.compile(rf"\b({'|'.join(name for name in _PARAMETERS if '_' in name)})\b")

router = Router()


@router.answer(CREATE, ResponsesBody, streams=True, in_batch=True)
async def create_response(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Answer a conversation, in items."""
    body = await parse_large(gateway.text, posted, ResponsesBody)
    ignored = ignored_header(body, body.left_out)
    response_id = new_id("resp_")
    if caller.idempotency_key and body.store is not False and gateway.config.store_url != NO_STORE:
        store = await gateway.store.opened()
        same = fingerprint(CREATE, posted.raw)
        response_id = "resp_" + await store.tries.name(caller.owner, caller.idempotency_key, same)
        if (earlier := await _earlier(gateway, store, body, response_id, caller.owner, ignored)) is not None:
            return earlier
    if body.background and body.store is None:
        body = body.model_copy(update={"store": True})  # rejected if the gateway has no store
    body, keeper = await with_conversation(gateway, body, posted.bytes, caller.owner)
    try:
        chat = await _chat(gateway, posted, body)
        asked = await ask(gateway, chat, caller, drop_oldest=body.drops_oldest)
        token_text = gateway.text.token_text if asked.settings.logprobs else None
        shape = ResponseShape(asked.request_id, asked.facts, body, asked.make_reader, token_text, keeper, response_id)
        ignored = ignored_header(body, [*body.left_out, *asked.unknown])
        answer = Answer(gateway, asked.prompts, shape, ignored, caller)
        if body.background and keeper is not None:
            return await respond_in_background(gateway, answer, shape, keeper, caller, stream=bool(body.stream))
        return await answer.respond(stream=bool(body.stream))
    except InvalidRequest as error:
        raise _renamed(error) from None


@router.answer("/v1/responses/input_tokens", InputTokensBody)
async def count_input_tokens(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Count the tokens of the prompt that a response would be generated from."""
    body = await parse_large(gateway.text, posted, InputTokensBody)
    ignored = ignored_header(body, body.left_out)
    counted, _ = await with_conversation(gateway, body, posted.bytes, caller.owner, keeps=False)
    try:
        chat = await _chat(gateway, posted, counted)
        facts = await gateway.fleet.model(chat.model)
        check_tools(gateway.formats, chat)
        prompt = await render_prompt(gateway.text, gateway.limits, chat, facts, None, drop_oldest=counted.drops_oldest)
    except InvalidRequest as error:
        raise _renamed(error) from None
    return response(200, {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}, ignored)


@router.get(_RESPONSE, openapi_extra=parameters(_STREAM, _STARTING_AFTER))
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response, or with ``stream=true`` the events of a streamed background response."""
    query, store, owner = Query(request), await opened(request), read_caller(request).owner
    check_include_query(request)
    kept = await store.responses.get(response_id, owner)
    if query.one_of("stream", ("false", "true", "False", "True")).lower() == "false":
        if query.text("starting_after") is not None:
            raise InvalidValue.at("starting_after", "only with stream=true; leave it out")
        return Response(kept.body, media_type="application/json")
    number = query.number("starting_after", -1, 0, _MOST_EVENTS) + 1
    if not await store.responses.events(response_id, number):
        raise InvalidValue.at(
            "stream",
            "the events of this response are not stored. They are stored for an hour if it was created with"
            " background=true and stream=true. Leave stream out to get the whole response",
        )
    return EventStream(store.background.follow(response_id, owner, number), lambda disconnected: None, {})


@router.post(f"{_RESPONSE}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response. A response that has ended does not change."""
    store = await opened(request)
    body = await store.responses.cancel(response_id, read_caller(request).owner)
    store.background.drop(response_id)
    return Response(body, media_type="application/json")


@router.delete(_RESPONSE)
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response. Responses that continue it keep a copy of its items."""
    store = await opened(request)
    await store.responses.delete(response_id, read_caller(request).owner)
    store.background.drop(response_id)
    return response(200, {"id": response_id, "object": "response", "deleted": True})


@router.get(f"{_RESPONSE}/input_items", openapi_extra=parameters(AFTER, limit(MAX_PAGE), ORDER))
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the items of the conversation that a response answers, the last one first."""
    query = Query(request)
    most, order = query.number("limit", 20, 1, MAX_PAGE), query.one_of("order", ("desc", "asc"))
    check_include_query(request)
    kept = await (await opened(request)).responses.get(response_id, read_caller(request).owner, with_items=True)
    items = await request.app.state.gateway.text.worked(len(kept.items), orjson.loads, kept.items)
    return response(200, page_of(items, query, most, reverse=order == "desc"))


def check_include_query(request: Request) -> None:
    """Raise ``InvalidRequest`` for a value of the query parameter ``include`` that is not supported."""
    query = request.query_params
    given = ",".join(query.getlist("include") + query.getlist("include[]"))
    try:
        check_includes(given.split(",") if given else [])
    except ValueError as error:
        raise InvalidValue.at("include", str(error)) from None


async def _earlier(
    gateway: Gateway, store: OpenStore, body: ResponsesBody, response_id: str, owner: str, headers: dict[str, str]
) -> Response | None:
    """Return the response that an earlier try of this request stored, or None.

    A stream that failed is generated again. Its new response replaces the stored one.
    """
    try:
        kept = await store.responses.get(response_id, owner)
    except NotFound:
        return None
    if not body.stream:
        return Response(kept.body, headers=headers, media_type="application/json")
    if body.background:
        return EventStream(store.background.follow(response_id, owner, 0), lambda disconnected: None, headers)
    if kept.status == FAILED:
        return None
    events = await gateway.text.worked(len(kept.body), replayed, kept.body)
    return Response(events, headers=headers, media_type="text/event-stream")


async def _chat(gateway: Gateway, posted: Posted, body: ResponsesBody) -> ChatBody:
    """Return ``body`` as a chat completion. Raises InvalidRequest."""
    large = posted.bytes > INLINE_BYTES or len(body.input) > _INLINE_ITEMS
    return await gateway.text.in_thread(body.chat) if large else body.chat()


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """Return ``error``, which names parameters of chat completions, with the names that they have here."""
    error.field = _PARAMETERS.get(error.field, error.field)
    error.message = _RENAMED.sub(lambda name: _PARAMETERS[name[0]], error.message)
    return error
