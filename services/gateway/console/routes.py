"""``/console``: a page to try the server with and to watch it."""

from functools import partial

from fastapi import FastAPI, Request, Response

from services.gateway.access.guard import CONSOLE, CONSOLE_STATE
from services.gateway.console.assets import Assets
from services.gateway.gateway import Gateway
from services.gateway.openai.errors import response


def add_console(api: FastAPI, *, public: bool) -> None:
    """The console on ``api``: on the ``public`` port with the playground, and, unless operators have a port of their
    own, with the live figures; on theirs with those alone."""
    gateway: Gateway = api.state.gateway
    live = not (public and gateway.config.admin_port)
    asks_key = public and gateway.guard.wants_keys
    assets = Assets()
    routes = {
        CONSOLE: assets.page,
        f"{CONSOLE}/": _page_without_slash,
        f"{CONSOLE}/static/{{name}}": assets.file,
        f"{CONSOLE}/config": partial(_config, {"keys": asks_key, "playground": public, "live": live}),
    }
    if live:
        routes[CONSOLE_STATE] = _state
    for path, endpoint in routes.items():
        api.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


async def _page_without_slash(request: Request) -> Response:
    """The page's links are relative, so that it works behind a proxy with a prefix."""
    return Response(status_code=308, headers={"location": "../console"})


async def _config(document: dict[str, bool], request: Request) -> Response:
    """What this port has of the console."""
    return response(200, document, {"cache-control": "no-store"})


async def _state(request: Request) -> Response:
    """Figures of this moment."""
    gateway: Gateway = request.app.state.gateway
    return Response(
        await gateway.observer.state(), headers={"cache-control": "no-store"}, media_type="application/json"
    )
