"""``POST /v1/responses``, and why ``GET /v1/responses/{id}`` finds nothing."""

import time

from fastapi import Request, Response

from services.common.errors import InvalidRequest, NotFound
from services.gateway.gateway import Gateway
from services.gateway.http import Caller, read_body, read_caller, while_connected
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat import Asked, ask
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.responses.body import ResponsesBody
from services.gateway.openai.responses.shape import ResponseShape

# Parameters of chat completions -> those that stand for them here.
_PARAMETERS = {"messages": "input", "reasoning_effort": "reasoning.effort"}


async def create_response(request: Request) -> Response:
    """Answer a conversation, in items."""
    started_at = time.perf_counter()
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    return await while_connected(request.receive, _respond(gateway, raw, read_caller(request), started_at))


async def get_response(request: Request, response_id: str) -> Response:
    """There is none."""
    raise NotFound(
        f"the response {response_id[:64]!r} does not exist: this server keeps none of its responses",
        field="response_id",
    )


async def _respond(gateway: Gateway, raw: bytes, caller: Caller, started_at: float) -> Response:
    body = await parse_large(gateway.text, raw, ResponsesBody)
    asked = await _asked(gateway, body, caller)
    shape = ResponseShape(asked.request_id, asked.facts, body, asked.make_reader)
    answer = Answer(gateway, asked.jobs, shape, ignored_header(body), started_at)
    return await answer.respond(stream=bool(body.stream))


async def _asked(gateway: Gateway, body: ResponsesBody, caller: Caller) -> Asked:
    try:
        return await ask(gateway, body.chat(), caller, "resp")
    except InvalidRequest as error:
        error.field = _PARAMETERS.get(error.field, error.field)
        raise
