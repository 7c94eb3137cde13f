"""Endpoints that put workers to sleep and wake them. They need the scope ``admin``."""

from typing import Literal

from fastapi import Request, Response
from pydantic import Field

from services.common.errors import InvalidRequest
from services.common.keys import ADMIN
from services.common.memory_parts import SLEEP_LEVELS
from services.gateway.http.errors import response
from services.gateway.http.request import while_connected
from services.gateway.openai.body import Body
from services.gateway.openai.parse import ignored_header
from services.gateway.openai.router import Router, parameters, takes
from services.gateway.rollout import sleep as sleeping
from services.gateway.rollout.request import MODES, gateway_of, read_mode, read_optional
from services.gateway.rollout.sleep import TAGS, Tag

_SLEEP_QUERY = parameters(
    {"name": "level", "in": "query", "schema": {"type": "integer", "enum": [*SLEEP_LEVELS], "default": 1}},
    {"name": "mode", "in": "query", "schema": {"type": "string", "enum": [*MODES], "default": "abort"}},
)
_WAKE_QUERY = parameters(
    {
        "name": "tags",
        "in": "query",
        "schema": {
            "type": "array",
            "items": {"type": "string", "enum": [*TAGS]},
            "description": "The parts to wake. Default: all.",
        },
    }
)


class ReleaseMemoryBody(Body):
    """``POST /release_memory_occupation``, which may have no body."""

    tags: list[Tag] | None = Field(default=None, description="The parts to give back. Default: all.")


class ResumeMemoryBody(Body):
    """``POST /resume_memory_occupation``, which may have no body."""

    tags: list[Tag | Literal["cuda_graph"]] | None = Field(
        default=None, description="The parts to take again. Default: all. CUDA graphs are never given back."
    )


router = Router(scope=ADMIN)


@router.post("/sleep", openapi_extra=_SLEEP_QUERY)
async def sleep(request: Request) -> Response:
    """Stop all computation and give the memory of the devices back, as vLLM does. New requests wait.

    ``level=1`` copies the weights to host memory, and ``level=2`` drops them. ``mode`` is as for ``/pause``. Requests
    that are kept are computed again after ``/wake_up``.
    """
    level, mode = _read_level(request), read_mode(request)
    call = sleeping.sleep(gateway_of(request).fleet, sleeping.parts_of(None), level, mode)
    aborted, released = await while_connected(request.receive, call)
    return response(200, {"status": "sleeping", "aborted_samples": aborted, "released_bytes": released})


@router.post("/wake_up", openapi_extra=_WAKE_QUERY)
async def wake_up(request: Request) -> Response:
    """Take the memory again, and continue when all parts are awake, as vLLM does.

    Weights that ``level=2`` dropped are read again from their files, unless an update has replaced them since
    ``/wake_up?tags=weights``. Without a sleep, this has no effect.
    """
    tags = [_read_tag(given) for given in request.query_params.getlist("tags")]
    call = sleeping.wake(gateway_of(request).fleet, sleeping.parts_of(tags))
    asleep = await while_connected(request.receive, call)
    return response(200, {"status": "sleeping" if asleep else "awake", "asleep": asleep})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Return whether all schedulers are asleep, in whole or in part."""
    return response(200, {"is_sleeping": await sleeping.is_sleeping(gateway_of(request).fleet)})


@router.post("/release_memory_occupation", openapi_extra=takes(ReleaseMemoryBody.model_json_schema()))
async def release_memory_occupation(request: Request) -> Response:
    """Give the memory of the devices back, as SGLang does. Requests are kept, and weights are copied to host memory."""
    body = await read_optional(request, ReleaseMemoryBody)
    call = sleeping.sleep(gateway_of(request).fleet, sleeping.parts_of(body.tags), 1, "keep")
    _, released = await while_connected(request.receive, call)
    return response(200, {"success": True, "message": f"{released} bytes were given back"}, ignored_header(body))


@router.post("/resume_memory_occupation", openapi_extra=takes(ResumeMemoryBody.model_json_schema()))
async def resume_memory_occupation(request: Request) -> Response:
    """Take the memory again, and continue when all parts are awake, as SGLang does."""
    body = await read_optional(request, ResumeMemoryBody)
    tags = [tag for tag in TAGS if tag in (body.tags or ())]
    if tags or not body.tags:  # else only CUDA graphs, which are never given back
        call = sleeping.wake(gateway_of(request).fleet, sleeping.parts_of(tags))
        await while_connected(request.receive, call)
    return response(200, {"success": True, "message": "the memory is in use again"}, ignored_header(body))


def _read_level(request: Request) -> int:
    given = request.query_params.get("level", "1")
    for level in SLEEP_LEVELS:
        if given == str(level):
            return level
    raise InvalidRequest(
        f"level is {given[:100]!r}: expected 1, to keep the weights in host memory, or 2, to drop them; to keep all"
        " memory, use /pause",
        field="level",
    )


def _read_tag(given: str) -> Tag:
    for tag in TAGS:
        if given == tag:
            return tag
    raise InvalidRequest(f"tags has {given[:100]!r}: expected {', '.join(TAGS)}", field="tags")
