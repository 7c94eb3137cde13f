"""Declarations of endpoints. Each module of handlers has a ``Router``, and ``app.routes`` lists the routers."""

import time
from collections.abc import Awaitable, Callable, Mapping
from inspect import cleandoc
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from services.common.keys import INFERENCE
from services.gateway.http.request import Caller, Posted, read_body, read_caller, while_connected
from services.gateway.openai.gateway import Gateway

# Answers a body. The response is whole, or an ``EventStream``. Raises TokaError.
Endpoint = Callable[[Gateway, Posted, Caller], Awaitable[Response]]

_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {}}}
AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}
ORDER = {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}}


class Router(APIRouter):
    """Endpoints that need the same ``scope`` of an API key, or no key if it is None.

    With ``head``, each GET endpoint also answers HEAD.
    """

    def __init__(self, scope: str | None = INFERENCE, *, head: bool = True) -> None:
        super().__init__(redirect_slashes=False)
        self.scope = scope
        self.in_batch: dict[str, Endpoint] = {}  # endpoints that a Batch job may call, by path
        self._head = head

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Add a route, as FastAPI's decorators do."""
        super().add_api_route(path, endpoint, **options)
        if self._head and options.get("methods") == ["GET"]:
            super().add_api_route(path, endpoint, **options | {"methods": ["HEAD"], "include_in_schema": False})

    def answer(
        self, path: str, body: type[BaseModel], *, streams: bool = False, in_batch: bool = False
    ) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that serves POST requests at ``path`` with an ``Endpoint``.

        ``body`` is only documented here: the endpoint itself parses it. ``streams``: the response may be an event
        stream. ``in_batch``: the lines of a Batch job may call the endpoint.
        """

        def serve(answer: Endpoint) -> Endpoint:
            async def handle(request: Request) -> Response:
                started_at = time.perf_counter()
                gateway: Gateway = request.app.state.gateway
                raw = await read_body(request, gateway.config.max_body_bytes)
                caller = read_caller(request, raw, started_at)
                return await while_connected(request.receive, answer(gateway, Posted(raw), caller))

            self.post(
                path,
                name=answer.__name__,
                description=cleandoc(answer.__doc__ or ""),
                responses={200: {"content": _STREAM}} if streams else None,
                openapi_extra=takes(body.model_json_schema()),
            )(handle)
            if in_batch:
                self.in_batch[path] = answer
            return answer

        return serve


def takes(schema: Mapping[str, Any], kind: str = "application/json") -> dict[str, Any]:
    """Return ``openapi_extra`` of an endpoint whose request has a body."""
    return {"requestBody": {"content": {kind: {"schema": schema}}, "required": True}}


def parameters(*given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``openapi_extra`` of an endpoint with query parameters."""
    return {"parameters": list(given)}


def limit(most: int) -> dict[str, Any]:
    """Return the query parameter for the size of a page."""
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}
