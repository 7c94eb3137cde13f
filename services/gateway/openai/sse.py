"""Server-sent events: the response that streams them, and templates for the JSON of chunks."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.boundaries import errors_as_internal
from services.common.errors import TokaError
from services.gateway.http.errors import to_body
from services.gateway.http.request import while_connected

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    """Return the event with ``document`` as its data."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def error_event(error: TokaError) -> bytes:
    """Return the event that ends a stream because of ``error``."""
    return event(to_body(error))


class Template:
    """An event whose JSON object is written once, but for one value: ``{**fixed, key: <value>, **rest}``."""

    def __init__(self, fixed: dict[str, Any], key: str, rest: dict[str, Any] | None = None) -> None:
        self._before = b"data: " + orjson.dumps(fixed)[:-1] + b"," + orjson.dumps(key) + b":"
        self._after = (b"," + orjson.dumps(rest)[1:] if rest else b"}") + b"\n\n"

    def fill(self, value: bytes) -> bytes:
        """Return the event with ``value``, which is JSON."""
        return self._before + value + self._after


class EventStream(Response):
    """A response that sends ``events`` until they end or the client disconnects.

    ``close`` is called at the end, with True if the client disconnected. An error from ``events`` becomes the last
    event, which ``broken`` returns, since the status line has been sent.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[bool], None],
        headers: dict[str, str],
        broken: Callable[[TokaError], bytes] | None = None,
    ) -> None:
        super().__init__(
            headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._broken = broken or error_event

    def taken(self) -> tuple[AsyncIterator[bytes], Callable[[], None]]:
        """Return the events, and a function to call at their end, for a background task instead of a client."""
        return self._events, lambda: self._close(False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = False
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            disconnected = True
        finally:
            self._close(disconnected)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            with errors_as_internal(log, "stream failed", expected=(OSError,)):
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except TokaError as error:
            await send({"type": "http.response.body", "body": self._broken(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
