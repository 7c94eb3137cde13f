"""The application of ``admin_port``: probes, metrics and the console, for operators."""

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import PermissionDenied, TokaError
from services.gateway.app import probes
from services.gateway.app.routes import OPERATOR_ROUTERS
from services.gateway.console import routes as console
from services.gateway.console.observer import Observer
from services.gateway.http.errors import to_response
from services.gateway.http.web_pages import WebPages
from services.gateway.openai.gateway import Gateway


def make_admin_app(gateway: Gateway, observer: Observer) -> ASGIApp:
    """Return the application of ``admin_port`` and of the socket that ``toka`` asks.

    It requires no API key: only an operator's process can connect. Web pages in a browser can connect too, so requests
    of foreign pages are refused.
    """
    api = FastAPI(title="Tokasaurus, for operators", openapi_url=None, redirect_slashes=False)
    api.state.gateway, api.state.observer, api.state.for_operators = gateway, observer, True
    api.add_exception_handler(TokaError, _on_error)  # type: ignore[arg-type]  # typed for Exception only
    for router in (probes.router, console.pages, *OPERATOR_ROUTERS):
        api.include_router(router)
    return _WithoutWebPages(api, WebPages.admin(gateway.config))


async def _on_error(request: Request, error: TokaError) -> Response:
    return to_response(error)


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
