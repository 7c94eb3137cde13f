"""The HTTP application: which path leads where, and what an error looks like on all of them."""

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Internal, NotFound, TokaError
from services.gateway.anthropic import errors as anthropic_errors
from services.gateway.anthropic.body import CountTokensBody, MessagesBody
from services.gateway.anthropic.models import get_model, list_models
from services.gateway.anthropic.routes import count_tokens, create_message
from services.gateway.app import admin, probes
from services.gateway.app.openapi import describe
from services.gateway.batch.routes import BATCHABLE, add_routes
from services.gateway.batch.service import BatchService
from services.gateway.console.observer import Observer
from services.gateway.console.routes import add_console
from services.gateway.engine.metrics import OTHER_ROUTE, ROUTES
from services.gateway.engine.tracing import RequestSpan
from services.gateway.http import errors
from services.gateway.http.bodies import HeldBodies
from services.gateway.http.cors import with_cors
from services.gateway.http.guard import KEY, METRICS
from services.gateway.http.request import id_in_header, name_request
from services.gateway.http.web_pages import WebPages
from services.gateway.openai.chat import create_chat_completion
from services.gateway.openai.completions import create_completion
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.other import create_embedding, get_version
from services.gateway.openai.responses.body import InputTokensBody, ResponsesBody
from services.gateway.openai.responses.routes import INPUT_TOKENS, count_input_tokens, create_response
from services.gateway.openai.schemas import ChatBody, CompletionBody
from services.gateway.openai.stored import add_stored_routes
from services.gateway.openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize

log = structlog.get_logger(__name__)

# Nobody is there to read it; the number is what logs and metrics show (as nginx has it).
CLIENT_CLOSED_REQUEST = 499
REQUEST_ID = "x-request-id"

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(gateway: Gateway, batches: BatchService, observer: Observer) -> ASGIApp:
    """Return the application over ``gateway``, whose fleet its owner starts and stops."""
    return with_cors(_Application(gateway, _make_api(gateway, batches, observer)), gateway.config.cors_origins)


def _make_api(gateway: Gateway, batches: BatchService, observer: Observer) -> FastAPI:
    """Every path, with its documentation."""
    api = FastAPI(title="Tokasaurus", redirect_slashes=False)
    api.state.gateway, api.state.batches = gateway, batches

    for path, endpoint, body in (
        ("/v1/messages", create_message, MessagesBody),
        ("/v1/messages/count_tokens", count_tokens, CountTokensBody),
        ("/v1/completions", create_completion, CompletionBody),
        ("/v1/chat/completions", create_chat_completion, ChatBody),
        ("/v1/responses", create_response, ResponsesBody),
        (INPUT_TOKENS, count_input_tokens, InputTokensBody),
        ("/tokenize", tokenize, TokenizeBody),
        ("/detokenize", detokenize, DetokenizeBody),
    ):
        schema = {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}
        api.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra={"requestBody": schema})
    api.add_api_route("/v1/embeddings", create_embedding, methods=["POST"], response_model=None)
    shown: tuple[tuple[str, Callable[..., Awaitable[Response]]], ...] = (
        ("/v1/models", list_models),
        ("/v1/models/{model_id:path}", get_model),
        ("/health", probes.health),
        ("/ready", admin.ready),
        ("/ping", probes.ping),
        ("/version", get_version),
        (METRICS, probes.metrics),
    )
    for path, show in shown:
        if path == METRICS and gateway.config.admin_port:
            continue
        api.add_api_route(path, show, methods=["GET"], response_model=None)
        api.add_api_route(path, show, methods=["HEAD"], response_model=None, include_in_schema=False)
    add_routes(api)
    add_stored_routes(api)
    add_console(api, observer, public=True)
    api.openapi = partial(describe, api)  # type: ignore[method-assign]  # FastAPI's own way

    for kind in (TokaError, ClientDisconnect, Exception):
        api.add_exception_handler(kind, _on_error)
    api.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]  # its types want one for all
    return api


class _Application:
    """Calls the POST endpoints itself and leaves the rest to FastAPI, whose layers take a fifth of a short request's
    time and add nothing to an endpoint that reads its request and makes its response. Lets in who may, and counts all
    responses."""

    def __init__(self, gateway: Gateway, api: FastAPI) -> None:
        self._api = api
        self._metrics = gateway.metrics
        self._guard = gateway.guard
        self._web_pages = WebPages.public(gateway.config)
        self._tracing = gateway.tracing
        self._bodies = HeldBodies(gateway.config.max_bodies_bytes, gateway.config.max_body_bytes)
        self._endpoints: dict[str, Endpoint] = {
            route.path: route.endpoint
            for route in api.routes
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and "{" not in route.path
        }
        batches: BatchService = api.state.batches
        batches.endpoints |= {path: self._endpoints[path] for path in BATCHABLE if path in self._endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        scope["app"] = self._api
        name_request(scope)
        try:
            _check_path(scope)
            if self._web_pages is not None:
                self._web_pages.check(scope)
            self._guard.admit(scope)
        except TokaError as error:
            await self._refuse(error, scope, receive, send)
            return
        with self._bodies.holding(scope):
            if scope["method"] == "POST" and scope["path"] in self._endpoints:
                await self._answer(scope, receive, send)
            else:
                await self._api(scope, receive, self._counting(scope, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, key, limits = scope["path"], scope.get(KEY), self._guard.limits
        request, span = Request(scope, receive), None
        with contextlib.ExitStack() as running:
            if self._tracing is not None:
                span = running.enter_context(RequestSpan(self._tracing, scope))
            try:
                running.enter_context(limits.running(key))
                response = await self._endpoints[path](request)
            except Exception as error:
                if not isinstance(error, (TokaError, ClientDisconnect)):
                    log.exception("request failed", path=path)
                response = await _on_error(request, error)
            response.headers.update(limits.headers(key))
            response.headers[REQUEST_ID] = id_in_header(scope)
            self._metrics.count_response(path, response.status_code)
            if span is not None:
                span.answers(response)
            await response(scope, receive, send)

    async def _refuse(self, error: TokaError, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in ROUTES else OTHER_ROUTE
        response = _error_response(error, scope)
        response.headers[REQUEST_ID] = id_in_header(scope)
        self._metrics.count_response(path, response.status_code)
        await response(scope, receive, send)

    def _counting(self, scope: Scope, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(getattr(scope.get("route"), "path", "other"), message["status"])
                name = (REQUEST_ID.encode(), id_in_header(scope).encode())
                message = {**message, "headers": [*message["headers"], name]}
            await send(message)

        return counting


def _check_path(scope: Scope) -> None:
    """Raises ``NotFound``. A route's pattern may end before a newline, so that "/metrics" with one behind it is another
    path to whoever compares, and the same to the router."""
    if not scope["path"].isprintable():
        raise NotFound(f"there is no {scope['method']} {scope['path']} here", reason="UNKNOWN_URL")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        request.app.state.gateway.metrics.count_disconnect()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if not isinstance(error, TokaError):
        error = Internal("internal error; the server's log has the details")
    elif isinstance(error, Internal):
        log.error("request failed", path=request.url.path, reason=error.message)
    return _error_response(request.app.state.gateway.guard.told(error), request.scope)


def _error_response(error: TokaError, scope: Scope) -> Response:
    """Return the response for ``error`` in the form that the client of the request expects."""
    if anthropic_errors.is_anthropic(scope):
        return anthropic_errors.to_response(error, scope)
    return errors.to_response(error)


def _did_you_mean(request: Request) -> str:
    """Return a hint for the error message if the path fits with one ``/v1`` more or less, else an empty string."""
    path = request.url.path
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        scope = {**request.scope, "path": other}
        if other != path and any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return f"; did you mean {other}? Check the client's base URL"
    return ""


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.method} {request.url.path} here{_did_you_mean(request)}", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
    headers = dict(error.headers or {})
    if "Allow" in headers:  # Starlette names the methods of one route, and a path has a route for each
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods}))
    if anthropic_errors.is_anthropic(request.scope):
        return anthropic_errors.response(error.status_code, message, code or "http_error", request.scope, headers)
    content = errors.body(message, "invalid_request_error", None, code)
    return errors.response(error.status_code, content, headers)
