"""``/metrics`` of a service that speaks no HTTP otherwise: schedulers and workers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from services.common.config import MetricsConfig
from services.common.handover import listen
from services.common.metrics.registry import registry_of

log = structlog.get_logger(__name__)

_MOST_HEAD_BYTES = 16 * 1024
_MOST_CONNECTIONS = 16  # one more is closed at once: each may hold a thread
_PATIENCE_S = 10.0  # for a request to come and its answer to be taken
_PATH = "/metrics"


@contextlib.asynccontextmanager
async def serve_metrics(config: MetricsConfig, collector: Collector) -> AsyncIterator[str]:
    """While it is entered, ``GET /metrics`` on ``metrics_host:metrics_port`` tells what ``collector`` knows and facts
    about the process. Gives the address; without a port nothing listens, and it is empty. ``collector`` is asked in a
    thread. Raises ``Unavailable`` for a port that cannot be had."""
    if not config.metrics_port:
        yield ""
        return
    (listener,) = listen(config.metrics_host, config.metrics_port, flags=("metrics_host", "metrics_port"))
    async with serve_on(listener, [collector]) as address:
        log.info("metrics", url=f"http://{address}{_PATH}")
        yield address


@contextlib.asynccontextmanager
async def serve_on(listener: socket.socket, collectors: Iterable[Collector]) -> AsyncIterator[str]:
    """As ``serve_metrics``, on a socket that listens."""
    page = _Page(registry_of(collectors))
    server = await asyncio.start_server(page.answer, sock=listener, limit=_MOST_HEAD_BYTES)
    host, port = listener.getsockname()[:2]
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        server.close()
        page.leave()


class _Page:
    """Owned by the service's event loop, as its connections are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._connections: set[asyncio.StreamWriter] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, and the connection is closed."""
        try:
            if len(self._connections) < _MOST_CONNECTIONS:
                self._connections.add(writer)
                async with asyncio.timeout(_PATIENCE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._response(head.partition(b"\r\n")[0].decode("latin-1")))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # it has gone, is too slow, or speaks something else
        finally:
            self._connections.discard(writer)
            writer.close()

    def leave(self) -> None:
        """Whoever waits for an answer waits no longer."""
        for writer in self._connections:
            writer.transport.abort()

    async def _response(self, line: str) -> bytes:
        method, _, target = line.partition(" ")
        if target.partition(" ")[0].partition("?")[0] != _PATH:
            return _message("404 Not Found", b"there is /metrics here\n", "text/plain")
        if method not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", b"", "text/plain", "allow: GET, HEAD\r\n")
        text = await asyncio.to_thread(generate_latest, self._registry)
        return _message("200 OK", text, CONTENT_TYPE_LATEST, with_body=method == "GET")


def _message(status: str, body: bytes, content_type: str, more: str = "", *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{more}"
    return f"{head}connection: close\r\n\r\n".encode() + (body if with_body else b"")
