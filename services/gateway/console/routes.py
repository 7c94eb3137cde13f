"""The endpoints of ``/console``."""

from fastapi import Request, Response

from services.common.errors import InvalidRequest
from services.common.keys import ADMIN
from services.gateway.console.assets import respond
from services.gateway.console.cancelling import cancel_request
from services.gateway.console.observer import Observer
from services.gateway.http.errors import response
from services.gateway.http.guard import CONSOLE
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.router import Router

# The page and its files are the same for everyone: it needs a key for what it shows.
pages = Router(scope=None)
live = Router(scope=ADMIN)  # figures, and what an operator can do about them


@pages.get(CONSOLE, include_in_schema=False)
async def get_page(request: Request) -> Response:
    """Return the console's page."""
    return respond(request, "index.html")


@pages.get(f"{CONSOLE}/", include_in_schema=False)
async def redirect_to_page(request: Request) -> Response:
    """Redirect to the URL without a slash. The page's links are relative, for proxies with a path prefix."""
    return Response(status_code=308, headers={"location": "../console"})


@pages.get(f"{CONSOLE}/static/{{name:path}}", include_in_schema=False)
async def get_file(request: Request, name: str) -> Response:
    """Return a static file. Raises ``NotFound``."""
    return respond(request, name)


@pages.get(f"{CONSOLE}/config", include_in_schema=False)
async def get_config(request: Request) -> Response:
    """Return which parts of the console this port has."""
    gateway: Gateway = request.app.state.gateway
    public = not request.app.state.for_operators
    document = {
        "keys": public and gateway.guard.wants_keys,
        "playground": public,
        "live": not (public and gateway.config.admin_port),
    }
    return response(200, document, {"cache-control": "no-store"})


@live.get(f"{CONSOLE}/state", include_in_schema=False)
async def get_state(request: Request) -> Response:
    """Return the current figures."""
    observer: Observer = request.app.state.observer
    return Response(await observer.state(), headers={"cache-control": "no-store"}, media_type="application/json")


# Pages of other origins cannot send DELETE, since browsers send a preflight request first.
@live.delete(f"{CONSOLE}/requests", include_in_schema=False)
async def cancel(request: Request) -> Response:
    """Cancel the request whose ``id`` is in the query. Its client gets an error."""
    gateway: Gateway = request.app.state.gateway
    if not (request_id := request.query_params.get("id")):
        raise InvalidRequest("the query has no request id; add ?id=...", field="id")
    return response(200, {"id": request_id, "samples": await cancel_request(gateway.fleet, request_id)})
