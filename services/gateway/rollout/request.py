"""Reading of requests to endpoints for trainers."""

from typing import get_args

from fastapi import Request

from services.common.errors import InvalidRequest
from services.gateway.http.request import Posted, read_body
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.parse import B, parse_large, validate
from services.gateway.rollout import control

MODES: tuple[control.PauseMode, ...] = get_args(control.PauseMode)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves ``request``."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def read_optional(request: Request, kind: type[B]) -> B:
    """Return the body of a request, or the default one if the request has none. Raises ``InvalidRequest``."""
    if not int(request.headers.get("content-length", 0)) and "transfer-encoding" not in request.headers:
        await request.body()
        return validate({}, kind)
    gateway = gateway_of(request)
    return await parse_large(gateway.text, Posted(await read_body(request, gateway.config.max_body_bytes)), kind)


def read_mode(request: Request) -> control.PauseMode:
    """Return the query parameter ``mode``, by default ``abort``. Raises ``InvalidRequest``."""
    given = request.query_params.get("mode", "abort")
    for mode in MODES:
        if given == mode:
            return mode
    raise InvalidRequest(f"mode is {given[:100]!r}: expected {', '.join(MODES)}", field="mode")
