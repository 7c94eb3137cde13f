"""What is for operators: a port of its own for it, and what of it the public port shows."""

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import PermissionDenied
from services.gateway.app import probes
from services.gateway.console.observer import Observer
from services.gateway.console.routes import add_console
from services.gateway.http.errors import response, to_response
from services.gateway.http.web_pages import WebPages
from services.gateway.openai.gateway import Gateway


def make_admin_app(gateway: Gateway, observer: Observer) -> ASGIApp:
    """Return the application of ``admin_port`` and of the socket that ``toka`` asks.

    It requires no key: every process that can connect is an operator's. A web page is not.
    """
    api = FastAPI(title="Tokasaurus, for operators", openapi_url=None, redirect_slashes=False)
    api.state.gateway = gateway
    for path, endpoint in (
        ("/health", probes.health),
        ("/ready", probes.ready),
        ("/ping", probes.ping),
        ("/metrics", probes.metrics),
    ):
        api.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
    add_console(api, observer, public=False)
    return _WithoutWebPages(api, WebPages.admin(gateway.config))


class _WithoutWebPages:
    """An application that foreign web pages cannot call."""

    def __init__(self, app: ASGIApp, web_pages: WebPages) -> None:
        self._app = app
        self._web_pages = web_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._web_pages.check(scope)
            except PermissionDenied as error:
                await to_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def ready(request: Request) -> Response:
    """Whether a request sent now would be served; why not, to operators only."""
    gateway: Gateway = request.app.state.gateway
    told = await probes.ready(request)
    if gateway.guard.tells_all(request.scope):
        return told
    ready = told.status_code == 200
    document = {"ready": ready, "reason": None if ready else "not ready; operators are told why"}
    return response(told.status_code, document, None if ready else {"retry-after": "1"})
