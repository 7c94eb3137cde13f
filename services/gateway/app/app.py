"""The HTTP application: authorisation, dispatch to endpoints, and errors in the form that the client expects."""

import contextlib
from functools import partial

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Internal, NotFound, TokaError
from services.gateway.anthropic import errors as anthropic_errors
from services.gateway.app.openapi import describe
from services.gateway.app.routes import RouteTable
from services.gateway.batch.service import BatchService
from services.gateway.console.observer import Observer
from services.gateway.engine.tracing import request_span
from services.gateway.http import errors
from services.gateway.http.bodies import HeldBodies
from services.gateway.http.cors import with_cors
from services.gateway.http.guard import KEY
from services.gateway.http.request import id_in_header, name_request
from services.gateway.http.web_pages import WebPages
from services.gateway.openai.gateway import Gateway

log = structlog.get_logger(__name__)

# Status for requests whose client has disconnected. Only logs and metrics show it, like nginx's.
CLIENT_CLOSED_REQUEST = 499
REQUEST_ID = "x-request-id"


def make_app(gateway: Gateway, batches: BatchService, observer: Observer) -> ASGIApp:
    """Return the application over ``gateway``, whose fleet its owner starts and stops."""
    api = FastAPI(title="Tokasaurus", redirect_slashes=False)
    api.state.gateway, api.state.batches, api.state.observer = gateway, batches, observer
    api.state.for_operators = False
    api.state.routes = routes = RouteTable(api, with_operators=not gateway.config.admin_port)
    gateway.metrics.add_routes(routes.documented_paths)
    api.openapi = partial(describe, api)  # type: ignore[method-assign]  # as FastAPI's documentation does
    for kind in (TokaError, ClientDisconnect, Exception):
        api.add_exception_handler(kind, _on_error)
    api.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]  # typed for Exception only
    return with_cors(_Application(gateway, api, routes), gateway.config.cors_origins)


class _Application:
    """Authorises requests, and counts all responses.

    It calls the endpoints of POST itself and leaves other requests to FastAPI, whose layers take a fifth of a short
    request's time and add nothing to an endpoint that reads its request and makes its response.
    """

    def __init__(self, gateway: Gateway, api: FastAPI, routes: RouteTable) -> None:
        self._api = api
        self._routes = routes
        self._endpoints = routes.endpoints
        self._metrics = gateway.metrics
        self._guard = gateway.guard
        self._web_pages = WebPages.public(gateway.config)
        self._tracing = gateway.tracing
        self._bodies = HeldBodies(gateway.config.max_bodies_bytes, gateway.config.max_body_bytes)

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
            self._guard.admit(scope, self._routes.needed_scope(scope))
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
        request, trace_response = Request(scope, receive), None
        with contextlib.ExitStack() as running:
            if self._tracing is not None:
                trace_response = running.enter_context(request_span(self._tracing, scope))
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
            if trace_response is not None:
                trace_response(response)
            await response(scope, receive, send)

    async def _refuse(self, error: TokaError, scope: Scope, receive: Receive, send: Send) -> None:
        response = _error_response(error, scope)
        response.headers[REQUEST_ID] = id_in_header(scope)
        self._metrics.count_response(scope["path"], response.status_code)
        await response(scope, receive, send)

    def _counting(self, scope: Scope, send: Send) -> Send:
        """Return ``send`` with a counter of responses, which also adds the request id to their headers."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(getattr(scope.get("route"), "path", "other"), message["status"])
                name = (REQUEST_ID.encode(), id_in_header(scope).encode())
                message = {**message, "headers": [*message["headers"], name]}
            await send(message)

        return counting


def _check_path(scope: Scope) -> None:
    """Raise NotFound for a path that is not printable.

    The pattern of a route may end before a newline, so "/metrics" and "/metrics\\n" would match the same route.
    """
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
        headers["Allow"] = ", ".join(sorted(request.app.state.routes.allowed_methods(request.scope)))
    if anthropic_errors.is_anthropic(request.scope):
        return anthropic_errors.response(error.status_code, message, code or "http_error", request.scope, headers)
    content = errors.body(message, "invalid_request_error", None, code)
    return errors.response(error.status_code, content, headers)
