"""``/v1/responses/{id}``: read, cancel and delete stored responses, and list their input."""

import orjson
from fastapi import Request, Response

from services.common.errors import InvalidValue
from services.gateway.http.errors import response
from services.gateway.http.request import read_caller
from services.gateway.openai.responses.body import check_includes
from services.gateway.openai.router import AFTER, ORDER, Router, limit, parameters
from services.gateway.openai.sse import EventStream
from services.gateway.store.queries import Query
from services.gateway.store.service import opened
from services.gateway.store.shapes import page_of

MAX_PAGE = 100
_MOST_EVENTS = 2**31 - 2
_RESPONSE = "/v1/responses/{response_id}"
_STREAM = {"name": "stream", "in": "query", "schema": {"type": "boolean"}}
_STARTING_AFTER = {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}}

router = Router()


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
    kept = await (await opened(request)).responses.get(response_id, read_caller(request).owner)
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
