"""``/v1/responses``."""

import contextlib
import re
import time

import orjson
from fastapi import Request, Response

from services.common.errors import InvalidRequest, NotFound
from services.gateway.access.idempotency import fingerprint
from services.gateway.batch.ids import new_id
from services.gateway.batch.queries import Query
from services.gateway.batch.service import NO_STORE, opened
from services.gateway.batch.shapes import page
from services.gateway.gateway import Gateway
from services.gateway.http import Caller, read_body, read_caller, while_connected
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat import Asked, ask
from services.gateway.openai.errors import response
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.responses.body import ResponsesBody, check_includes
from services.gateway.openai.responses.keeping import with_conversation
from services.gateway.openai.responses.shape import ResponseShape
from services.gateway.text import INLINE_BYTES

CREATE = "/v1/responses"
MAX_PAGE = 100
_INLINE_ITEMS = 512  # a longer conversation is put together in a thread
# Parameters of chat completions -> those that stand for them here.
_PARAMETERS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_NO_WORDS = re.compile(rf"\b({'|'.join(name for name in _PARAMETERS if '_' in name)})\b")


async def create_response(request: Request) -> Response:
    """Answer a conversation, in items."""
    started_at = time.perf_counter()
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    return await while_connected(request.receive, _respond(gateway, raw, read_caller(request, raw), started_at))


async def get_response(request: Request, response_id: str) -> Response:
    """A response that was stored."""
    query = request.query_params
    if query.get("stream", "false").lower() != "false" or "starting_after" in query:
        raise InvalidRequest(
            "stream: a response is told again as a whole only; leave it out", field="stream", reason="INVALID_VALUE"
        )
    _check_includes(request)
    kept = await (await opened(request)).responses.get(response_id, read_caller(request).owner)
    return Response(kept.body, media_type="application/json")


async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response. Those that go on with it have what they need of it."""
    await (await opened(request)).responses.delete(response_id, read_caller(request).owner)
    return response(200, {"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request, response_id: str) -> Response:
    """The conversation that a response answers, the last item first."""
    query = Query(request)
    limit, order = query.number("limit", 20, 1, MAX_PAGE), query.one_of("order", ("desc", "asc"))
    _check_includes(request)
    kept = await (await opened(request)).responses.get(response_id, read_caller(request).owner)
    items = await request.app.state.gateway.text.worked(len(kept.items), orjson.loads, kept.items)
    if order == "desc":
        items.reverse()
    if (after := query.text("after")) is not None:
        places = [place for place, item in enumerate(items, 1) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after={after[:100]!r}: there is no such item", field="after")
        items = items[places[0] :]
    return response(200, page(items[:limit], len(items) > limit))


async def _respond(gateway: Gateway, raw: bytes, caller: Caller, started_at: float) -> Response:
    body = await parse_large(gateway.text, raw, ResponsesBody)
    ignored = ignored_header(body)
    response_id = new_id("resp_")
    if caller.idempotency_key and body.store is not False and gateway.config.store_url != NO_STORE:
        place = await gateway.batches.opened()
        same = fingerprint(CREATE, raw)
        response_id = "resp_" + await place.tries.name(caller.owner, caller.idempotency_key, same)
        if not body.stream:
            with contextlib.suppress(NotFound):
                kept = await place.responses.get(response_id, caller.owner)
                return Response(kept.body, headers=ignored, media_type="application/json")
    body, keeper = await with_conversation(gateway, body, len(raw), caller.owner)
    asked = await _asked(gateway, body, caller, large=len(raw) > INLINE_BYTES or len(body.input) > _INLINE_ITEMS)
    token_text = gateway.text.token_text if asked.settings.logprobs else None
    shape = ResponseShape(asked.request_id, asked.facts, body, asked.make_reader, token_text, keeper, response_id)
    answer = Answer(gateway, asked.jobs, shape, ignored, started_at, caller)
    try:
        return await answer.respond(stream=bool(body.stream))
    except InvalidRequest as error:
        raise _renamed(error) from None


async def _asked(gateway: Gateway, body: ResponsesBody, caller: Caller, *, large: bool) -> Asked:
    try:
        chat = await gateway.text.in_thread(body.chat) if large else body.chat()
        return await ask(gateway, chat, caller)
    except InvalidRequest as error:
        raise _renamed(error) from None


def _renamed(error: InvalidRequest) -> InvalidRequest:
    error.field = _PARAMETERS.get(error.field, error.field)
    error.message = _NO_WORDS.sub(lambda name: _PARAMETERS[name[0]], error.message)
    return error


def _check_includes(request: Request) -> None:
    query = request.query_params
    given = ",".join(query.getlist("include") + query.getlist("include[]"))
    try:
        check_includes(given.split(",") if given else [])
    except ValueError as error:
        raise InvalidRequest(f"include: {error}", field="include", reason="INVALID_VALUE") from None
