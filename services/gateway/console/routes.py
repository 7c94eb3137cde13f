"""The endpoints of ``/console``."""

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request, Response

from services.common.errors import InvalidRequest, TokaError
from services.gateway.console.assets import Assets
from services.gateway.console.cancelling import cancel_request
from services.gateway.console.observer import Observer
from services.gateway.http.errors import response, to_response
from services.gateway.http.guard import CONSOLE, CONSOLE_REQUESTS, CONSOLE_STATE
from services.gateway.openai.gateway import Gateway


def add_console(api: FastAPI, observer: Observer, *, public: bool) -> None:
    """Add the console's endpoints to ``api``.

    The ``public`` port has the playground. The live figures and the cancellation of requests are on the admin port, or
    on the public port if there is no admin port.
    """
    gateway: Gateway = api.state.gateway
    live = not (public and gateway.config.admin_port)
    asks_key = public and gateway.guard.wants_keys
    assets = Assets()
    routes: dict[str, Callable[..., Awaitable[Response]]] = {
        CONSOLE: assets.page,
        f"{CONSOLE}/": _page_without_slash,
        f"{CONSOLE}/static/{{name}}": assets.file,
        f"{CONSOLE}/config": partial(_config, {"keys": asks_key, "playground": public, "live": live}),
    }
    if live:
        routes[CONSOLE_STATE] = partial(_state, observer)
        # Pages of other origins cannot send DELETE, since browsers send a preflight request first.
        api.add_api_route(CONSOLE_REQUESTS, _cancel, methods=["DELETE"], response_model=None, include_in_schema=False)
    for path, endpoint in routes.items():
        api.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


async def _page_without_slash(request: Request) -> Response:
    """Redirect to the URL without a slash. The page's links are relative, for proxies with a path prefix."""
    return Response(status_code=308, headers={"location": "../console"})


async def _config(document: dict[str, bool], request: Request) -> Response:
    """Return which parts of the console this port has."""
    return response(200, document, {"cache-control": "no-store"})


async def _state(observer: Observer, request: Request) -> Response:
    """Return the current figures."""
    return Response(await observer.state(), headers={"cache-control": "no-store"}, media_type="application/json")


async def _cancel(request: Request) -> Response:
    """Cancel the request whose ``id`` is in the query. Its client gets an error."""
    gateway: Gateway = request.app.state.gateway
    try:
        if not (request_id := request.query_params.get("id")):
            raise InvalidRequest("the query has no request id; add ?id=...", field="id")
        return response(200, {"id": request_id, "samples": await cancel_request(gateway.fleet, request_id)})
    except TokaError as error:  # the admin port has no error handler
        return to_response(error)
