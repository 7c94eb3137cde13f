"""``POST /v1/chat/completions/batch``: many conversations in one request, with one response when all are done."""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import Request, Response

from services.common.boundaries import errors_as_internal
from services.common.errors import InvalidRequest, InvalidValue, TokaError
from services.common.json_scan import Raw
from services.common.process.time_slice import TimeSlice
from services.gateway.batch.requests import Requests
from services.gateway.http.errors import to_response
from services.gateway.http.request import Caller, Posted, read_body, read_caller, while_connected
from services.gateway.openai.compiler import seed_of
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.json_value import may_be_too_deep, write_again
from services.gateway.openai.parse import IGNORED_HEADER, listed_as_ignored, off_loop, read_json
from services.gateway.openai.router import Router, takes

log = structlog.get_logger(__name__)

CHAT = "/v1/chat/completions"
_ANSWER_BYTES = 256  # approximate size of one answer and its headers
# The schema has no schema of an item: an invalid body gets an error at its index of the response.
TOGETHER_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "items": {}}

router = Router()


@router.post("/v1/chat/completions/batch", openapi_extra=takes(TOGETHER_SCHEMA))
async def create_chat_completions(request: Request) -> Response:
    """Answer a list of bodies of chat completions with a list of chat completions and errors, in order."""
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    bodies = await off_loop(gateway.text, raw, _read_list, gateway.config.max_choices)
    requests, caller = Requests(gateway), read_caller(request, raw)
    size, deep = -(-len(raw) // len(bodies)), may_be_too_deep(raw)
    answers: dict[int, Response] = {}
    numbered = iter(enumerate(bodies))
    time_slice = TimeSlice()  # shared by all tasks

    async def answer_some() -> None:
        for number, body in numbered:
            if time_slice.is_over:
                await time_slice.renew()
            answers[number] = await _answer(requests, number, body, size, _seeded(caller, number), deep=deep)

    async def answer_all() -> list[Response]:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(bodies), gateway.config.batch_concurrency)):
                group.create_task(answer_some())
        return [answers[number] for number in range(len(bodies))]

    complete = await while_connected(request.receive, answer_all())
    return await gateway.text.worked(_ANSWER_BYTES * len(complete), _together, complete)


def _together(answers: Sequence[Response]) -> Response:
    """Return the response with the bodies of ``answers``, in order.

    Its header lists the ignored parameters of all answers, each with the index of its answer.
    """
    body = b"[" + b",".join(bytes(each.body) for each in answers) + b"]"
    given = enumerate(answer.headers.get(IGNORED_HEADER, "") for answer in answers)
    ignored = [f"[{number}].{name}" for number, names in given if names for name in names.split(",")]
    return Response(body, headers=listed_as_ignored(ignored), media_type="application/json")


def _seeded(caller: Caller, number: int) -> Caller:
    """Return the caller of request ``number`` of a list.

    Each request has its own seed. The idempotency key belongs to the list, and no request of it has one.
    """
    if caller.retry_seed is None:
        return caller
    return caller._replace(retry_seed=seed_of(caller.retry_seed, number), idempotency_key="")


def _read_list(raw: Raw, most: int) -> list[Any]:
    """Return the JSON array in ``raw``. Raises ``InvalidRequest``."""
    bodies = read_json(raw)
    if not isinstance(bodies, list):
        raise InvalidRequest("the body must be a JSON array of bodies of chat completions", reason="INVALID_JSON")
    if not 1 <= len(bodies) <= most:
        raise InvalidValue(f"the list has {len(bodies)} bodies: expected 1 to {most}")
    return bodies


async def _answer(requests: Requests, number: int, body: Any, size: int, caller: Caller, *, deep: bool) -> Response:
    """Return a chat completion, or an error."""
    try:
        with errors_as_internal(log, "a request of a list failed"):
            if isinstance(body, dict) and body.get("stream"):
                raise InvalidRequest(f"[{number}]: stream: not in a list; leave it out", field="stream")
            posted = Posted(write_again(body)) if deep else Posted(document=body, size=size)
            return await requests.ask(CHAT, posted, caller)
    except TokaError as error:
        return to_response(error)
