"""A client's connection, with limits on its requests and timeouts for slow clients.

It builds on private parts of uvicorn, whose version is therefore pinned; ``tests/gateway/access/test_uvicorn.py`` fails
when they change.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import httptools
import orjson
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.common.config import GatewayConfig
from services.common.config.gateway import MOST_CONNECTIONS
from services.common.host.descriptors import connections_within, current_limit, reserve_of
from services.gateway.http import errors
from services.gateway.http.reading import Backlog, Reading

log = structlog.get_logger(__name__)

_MIN_BODY_PROGRESS = 16 * 1024  # a body must grow by this number of bytes in each timeout
# If the server closes while the client still sends, the connection is reset and the client may not read the error. So
# further input is discarded for this time, on at most this number of connections beyond ``max_connections``.
_LINGER_S = 2.0
_MAX_LINGERING = 1024


class ConnectionLimits(NamedTuple):
    """Limits and timeouts (in seconds) of connections."""

    max_connections: int
    max_header_bytes: int
    slow_request_s: float
    slow_client_s: float

    @classmethod
    def of(cls, config: GatewayConfig) -> "ConnectionLimits":
        """Return the limits from the flags and from the limit of open files."""
        limit = current_limit()
        most = connections_within(limit, MOST_CONNECTIONS)
        if config.max_connections != "auto":
            if config.max_connections > connections_within(limit, config.max_connections):
                log.warning(
                    "max_connections is more than the limit of open files allows; connections beyond it wait",
                    max_connections=config.max_connections,
                    allowed=connections_within(limit, config.max_connections),
                    limit=limit,
                )
            most = config.max_connections
        return cls(most, config.max_header_bytes, config.slow_request_seconds, config.slow_client_seconds)


class Clock:
    """Seconds in which the event loop ran. While it is blocked, it reads nothing, so clients do not count as slow."""

    now = 0.0


def framing_error(version: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, str, str] | None:
    """Return status, message and code for headers that RFC 9112 requires a server to reject, or None.

    The sections are 3.2 (Host) and 6.1 (Transfer-Encoding). Names in ``headers`` are in lower case.
    """
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (version == "1.1" and not hosts):
        return 400, f"the request has {hosts} Host headers; send one", "invalid_http"
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding").lower().split(b",")
    given = [coding.strip() for coding in codings if coding.strip()]
    if unknown := next((coding for coding in given if coding != b"chunked"), None):
        coding = unknown[:64].decode("latin-1")
        message = f"the transfer coding {coding!r} is not known here; send the body chunked"
        return 501, message, "unknown_transfer_encoding"
    return None


class Connection(HttpToolsProtocol):
    """An HTTP connection. Runs on the event loop.

    ``sweep`` is called periodically and ends the connection if its client is too slow. A client that sends too slowly
    gets 408. A client that reads too slowly is disconnected, which cancels its request.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, clock: Clock, backlog: Backlog, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._clock = clock
        self._backlog = backlog
        self._refused = False
        self._received = False  # any bytes
        self._in_head = self._in_body = False
        self._head_since: float | None = None  # start of waiting for headers
        self._head_bytes = 0
        self._body_bytes = self._body_mark = 0  # received, now and at ``_body_since``
        self._body_since = 0.0  # time of the last sufficient progress
        self._framing_bytes = 0  # received without body bytes: chunk headers and trailers, which the parser keeps
        self._resuming = False  # a new parser is given the framing headers again
        self._reading = Reading()
        # uvicorn reports a disconnect only to the request that was parsed last. An earlier one may still run.
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._head_since = self._clock.now
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "too many connections; try again later", "too_many_connections")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._backlog.connections[self] = self._clock.now

    def resume_writing(self) -> None:
        super().resume_writing()
        self._backlog.connections.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        transport = self.transport
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._backlog.connections.pop(self, None)
        self._unset_keepalive_if_required()
        if sys.version_info < (3, 12):
            # A reference cycle that later versions break themselves.
            transport._read_ready_cb = None  # type: ignore[attr-defined]  # noqa: SLF001  # not of its interface

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._received = True
        if self._head_since is None and not self._in_body:
            self._head_since = self._clock.now
        in_head, in_body, body_bytes = self._in_head, self._in_body, self._body_bytes
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "this is not a valid HTTP request", "invalid_http")
            return
        if in_head and self._in_head:
            self._head_bytes += len(data)
        if in_body and self._in_body:
            self._framing_bytes = self._framing_bytes + len(data) if self._body_bytes == body_bytes else 0
        if max(self._head_bytes if self._in_head else 0, self._framing_bytes) > self._limits.max_header_bytes:
            self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """Parse ``data``. Ignore requests to upgrade to another protocol.

        The parser stops after the headers of such a request and treats the body as data of that protocol. So a new
        parser continues with the body, which would otherwise be lost or parsed as the next request.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            if self._in_body:
                self._resuming = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % self._framing())
                self._resuming = False

    def _framing(self) -> bytes:
        """Return the headers that frame the request's body, or an empty string if it has no body."""
        names = (b"content-length", b"transfer-encoding")
        return b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in names)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_since is None:
            self._head_since = self._clock.now

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, or a header that a new parser is given again
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._refused or self._resuming:
            return
        self._in_head, self._head_since = False, None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._limits.max_header_bytes:
            self._refuse_head()
            return
        if (refusal := framing_error(self.parser.get_http_version(), self.headers)) is not None:
            self._refuse(*refusal)
            return
        self._in_body, self._body_bytes, self._body_mark, self._body_since = True, 0, 0, self._clock.now
        self._framing_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused or (self.parser.should_upgrade() and self._framing()):  # its body has not been parsed yet
            return
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:  # the response ended first
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # Called by the server, periodically.

    def sweep(self) -> None:
        """End the connection if its client is too slow."""
        now = self._clock.now
        if self._reading.is_too_slow(now, self.transport, self._limits.slow_client_s):
            self.transport.abort()
        if not self._refused:
            self._sweep_request(now)

    def _sweep_request(self, now: float) -> None:
        limit = self._limits.slow_request_s
        answering = self.cycle is not None and not self.cycle.response_complete and not self._in_body
        if self.flow.read_paused or answering:  # the server is slow, not the client
            self._body_since = now
            self._head_since = None if self._head_since is None else now
        elif self._head_since is not None:
            if now - self._head_since > limit:
                self._refuse(408, "the headers of the request did not arrive in time", "request_timeout")
        elif self._in_body:
            answered = self.cycle.response_complete  # the rest is discarded, for a limited time
            if self._body_bytes - self._body_mark >= _MIN_BODY_PROGRESS and not answered:
                self._body_mark, self._body_since = self._body_bytes, now
            elif now - self._body_since > limit:
                self._refuse(408, "the body of the request did not arrive in time", "request_timeout")

    def _refuse_head(self) -> None:
        most = self._limits.max_header_bytes
        self._refuse(431, f"the headers of the request have more than {most} bytes", "request_header_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error unless a response is being sent, and close after the client has read it."""
        self._refused = True
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete or (self._in_body and not cycle.response_started)
        if not idle or self.pipeline or (cycle is not None and cycle.response_complete and self._in_body):
            self.transport.abort()
            return
        if self._received or status == 503:
            body = orjson.dumps(errors.body(message, "invalid_request_error", None, code))
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + (b"retry-after: 1\r\n" if status == 503 else b"")
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
        lingering = min(_MAX_LINGERING, reserve_of(current_limit()))
        if not self._received and len(self.connections) > self._limits.max_connections + lingering:
            self.transport.close()
            return
        if cycle is not None:  # discard the endpoint's response
            cycle.disconnected = True
            cycle.message_event.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(_LINGER_S, self.timeout_keep_alive_handler)
