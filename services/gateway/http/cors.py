"""Cross-origin requests of scripts on other web pages (``cors_origins=``)."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.guard import CONSOLE

# Response headers that a script may read.
_EXPOSED = (
    "request-id", "retry-after", "x-request-id", "x-should-retry", "x-toka-ignored-params",
    "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens", "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
)  # fmt: skip
_PREFLIGHT_S = 600  # lifetime of a preflight response in browsers


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return ``app`` with CORS for ``origins``, or ``app`` itself if there are none."""
    if not origins:
        return app
    return _CrossOrigin(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_S,
    )


class _CrossOrigin(CORSMiddleware):
    """Lets pages of the allowed origins call everything but the console.

    Another page could cancel requests through the console.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(CONSOLE):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
