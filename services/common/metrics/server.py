"""Serves ``/metrics`` of schedulers and workers, which have no other HTTP."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from services.common.allowed_hosts import AllowedHosts
from services.common.config import SchedulerConfig, WorkerConfig
from services.common.metrics.registry import registry_of
from services.common.process.acceptor import Acceptor
from services.common.process.handover import listen

log = structlog.get_logger(__name__)

_MOST_HEAD_BYTES = 16 * 1024
_MOST_CONNECTIONS = 16  # each may occupy a thread; a further connection is closed at once
_TIMEOUT_S = 10.0  # from accepting a connection to the end of its response
_PATH = "/metrics"
_FOREIGN_HOST = b"the header Host does not name this server; to accept the name, add it to allowed_hosts=\n"


@contextlib.asynccontextmanager
async def serve_metrics(config: SchedulerConfig | WorkerConfig, collector: Collector) -> AsyncIterator[str]:
    """Serve ``GET /metrics`` on ``metrics_host:metrics_port``: the metrics of ``collector`` and of the process.

    Yields the address, or an empty string if ``metrics_port`` is 0. ``collector`` runs in a thread. Raises
    ``Unavailable`` if the port cannot be bound.
    """
    if not config.metrics_port:
        yield ""
        return
    (listener,) = listen(config.metrics_host, config.metrics_port, flags=("metrics_host", "metrics_port"))
    hosts = AllowedHosts(config.metrics_host, config.allowed_hosts)
    async with serve_on(listener, [collector], hosts) as address:
        log.info("metrics", url=f"http://{address}{_PATH}")
        yield address


@contextlib.asynccontextmanager
async def serve_on(
    listener: socket.socket, collectors: Iterable[Collector], hosts: AllowedHosts | None = None
) -> AsyncIterator[str]:
    """Serve ``/metrics`` on a listening socket. If ``hosts`` is None, no names of ``allowed_hosts`` are accepted."""
    page = _Page(registry_of(collectors), hosts or AllowedHosts(""))
    server = Acceptor(listener, page.make_protocol, backlog=_MOST_CONNECTIONS, for_operators=True)
    host, port = listener.getsockname()[:2]
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        server.close()
        page.leave()


class _Page:
    """Page ``/metrics`` and its connections. Runs on the service's event loop."""

    def __init__(self, registry: CollectorRegistry, hosts: AllowedHosts) -> None:
        self._registry = registry
        self._hosts = hosts
        self._connections: set[asyncio.StreamWriter] = set()

    def make_protocol(self) -> asyncio.StreamReaderProtocol:
        """Return the protocol of a new connection."""
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(_MOST_HEAD_BYTES), self.answer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection."""
        try:
            if len(self._connections) < _MOST_CONNECTIONS:
                self._connections.add(writer)
                async with asyncio.timeout(_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._response(head.decode("latin-1")))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # the client disconnected, is too slow, or does not send HTTP
        finally:
            self._connections.discard(writer)
            writer.close()

    def leave(self) -> None:
        """Abort all connections."""
        for writer in self._connections:
            writer.transport.abort()

    async def _response(self, head: str) -> bytes:
        line, *headers = head.split("\r\n")
        for name, _, host in (header.partition(":") for header in headers):
            if name.strip().lower() == "host" and not self._hosts.allows(host):
                return _message("403 Forbidden", _FOREIGN_HOST, "text/plain")
        method, _, target = line.partition(" ")
        if target.partition(" ")[0].partition("?")[0] != _PATH:
            return _message("404 Not Found", b"this server has only /metrics\n", "text/plain")
        if method not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", b"", "text/plain", "allow: GET, HEAD\r\n")
        text = await asyncio.to_thread(generate_latest, self._registry)
        return _message("200 OK", text, CONTENT_TYPE_LATEST, with_body=method == "GET")


def _message(status: str, body: bytes, content_type: str, more: str = "", *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{more}"
    return f"{head}connection: close\r\n\r\n".encode() + (body if with_body else b"")
