"""The HTTP application: which path leads where, and what an error looks like on all of them."""

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Internal, TokaError
from services.gateway import probes
from services.gateway.gateway import Gateway
from services.gateway.openai import errors
from services.gateway.openai.chat import create_chat_completion
from services.gateway.openai.completions import create_completion
from services.gateway.openai.models import get_model, list_models
from services.gateway.openai.schemas import ChatBody, CompletionBody

log = structlog.get_logger(__name__)

# Nobody is there to read it; the number is what logs and metrics show (as nginx has it).
CLIENT_CLOSED_REQUEST = 499


def make_app(gateway: Gateway) -> FastAPI:
    """The application over ``gateway``, whose fleet its owner starts and stops."""
    app = FastAPI(title="Tokasaurus", redirect_slashes=False)
    app.state.gateway = gateway
    app.add_middleware(_CountResponses, gateway=gateway)

    for path, endpoint, body in (
        ("/v1/completions", create_completion, CompletionBody),
        ("/v1/chat/completions", create_chat_completion, ChatBody),
    ):
        schema = {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra={"requestBody": schema})
    for path, endpoint in (
        ("/v1/models", list_models),
        ("/v1/models/{model_id:path}", get_model),
        ("/health", probes.health),
        ("/ready", probes.ready),
        ("/ping", probes.ping),
        ("/metrics", probes.metrics),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)

    app.add_exception_handler(TokaError, _on_toka_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_defect)
    return app


async def _on_toka_error(request: Request, error: TokaError) -> Response:
    if isinstance(error, Internal):
        log.error("request failed", path=request.url.path, reason=error.message)
    return errors.to_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.method} {request.url.path} here", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
    content = errors.body(message, "invalid_request_error", None, code)
    return errors.response(error.status_code, content, dict(error.headers or {}))


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    request.app.state.gateway.metrics.disconnects += 1
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_defect(request: Request, error: Exception) -> Response:
    return errors.to_response(Internal("internal error; the server's log has the details"))


class _CountResponses:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._counts = gateway.metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._counts[getattr(route, "path", "other"), str(message["status"])] += 1
            await send(message)

        await self._app(scope, receive, counting)
