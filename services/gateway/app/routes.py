"""The table of routes: the routers of each port, and the data that is derived from their routes.

Routing, the scope that a request needs, the labels of metrics and ``/openapi.json`` are all derived from the routers.
An endpoint is added to the router of its module. A module with a new router is added here.
"""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from services.common.keys import INFERENCE
from services.gateway.anthropic import models
from services.gateway.anthropic import routes as anthropic
from services.gateway.app import probes
from services.gateway.batch import batch_routes, file_routes, together
from services.gateway.console import routes as console
from services.gateway.openai import chat, completions, other, stored_chats, tokens
from services.gateway.openai.responses import conversations
from services.gateway.openai.responses import routes as responses
from services.gateway.openai.router import Router
from services.gateway.rollout import broadcast_routes, sleep_routes, tensor_routes
from services.gateway.rollout import routes as rollout
from services.gateway.sglang import info
from services.gateway.sglang import routes as sglang
from services.gateway.vllm import generate as vllm

CLIENT_ROUTERS = (
    anthropic.router,
    completions.router,
    chat.router,
    responses.router,
    sglang.router,
    info.router,
    vllm.router,
    tokens.router,
    models.router,
    file_routes.router,
    batch_routes.router,
    together.router,
    conversations.router,
    stored_chats.router,
    other.router,
    probes.router,
    console.pages,
)
# On the port for operators, or on the public port if there is no other.
OPERATOR_ROUTERS = (
    probes.metrics_router,
    rollout.router,
    broadcast_routes.router,
    sleep_routes.router,
    tensor_routes.router,
    info.operators_router,
    console.live,
)


class RouteTable:
    """The routes of the public port."""

    def __init__(self, api: FastAPI, *, with_operators: bool) -> None:
        """Add the routers to ``api``. Those for operators are added only if ``with_operators``."""
        self._routes: list[BaseRoute] = list(api.routes)
        self._scopes: dict[str, str | None] = {}
        self._patterns: list[tuple[APIRoute, str | None]] = []  # with path parameters, and another scope than INFERENCE
        self.endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {}  # of POST, by path
        for router in (*CLIENT_ROUTERS, *OPERATOR_ROUTERS):
            self._add_scopes(router)
            if router not in OPERATOR_ROUTERS or with_operators:
                api.include_router(router)
                self._add(_api_routes(router))

    def needed_scope(self, scope: Scope) -> str | None:
        """Return the scope that a request's API key needs, or None if it needs no key.

        A request to an unknown path needs a key like any other.
        """
        path = scope["path"]
        if path in self._scopes:
            return self._scopes[path]
        return next((needed for route, needed in self._patterns if route.path_regex.match(path)), INFERENCE)

    @property
    def documented_paths(self) -> list[str]:
        """Paths in ``/openapi.json`` of all ports."""
        routers = (*CLIENT_ROUTERS, *OPERATOR_ROUTERS)
        routes = [route for router in routers for route in _api_routes(router) if route.include_in_schema]
        return list(dict.fromkeys(route.path for route in routes))

    def allowed_methods(self, scope: Scope) -> set[str]:
        """Return the methods of the routes that match the path of a request."""
        found = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return {method for route in found for method in getattr(route, "methods", None) or ()}

    def _add_scopes(self, router: Router) -> None:
        for route in _api_routes(router):
            if "{" not in route.path:
                self._scopes[route.path] = router.scope
            elif router.scope != INFERENCE:
                self._patterns.append((route, router.scope))

    def _add(self, routes: Sequence[APIRoute]) -> None:
        self._routes += routes
        posts = (route for route in routes if "POST" in (route.methods or ()) and "{" not in route.path)
        self.endpoints |= {route.path: route.endpoint for route in posts}


def _api_routes(router: Router) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]
