"""Sends the load to a statsd server: gauges as values, counters as increments."""

import socket
from collections.abc import Iterator

import structlog

from services.common.errors import Unavailable
from tokasaurus.scheduler.v1 import observe_pb2

log = structlog.get_logger(__name__)

_MOST_BYTES = 1432  # of a datagram, so that Ethernet does not fragment it
_GAUGES = (
    "running_sequences", "waiting_sequences", "total_pages", "free_pages", "cached_pages", "in_use_pages",
    "outstanding_tokens", "plans_in_flight", "plans_ahead",
)  # fmt: skip


class Statsd:
    """Client of a statsd server. Used by the step loop's thread.

    Sending never blocks. Datagrams that the network does not accept are lost, as usual with UDP.
    """

    def __init__(self, server: str, prefix: str) -> None:
        """Resolve the name in ``server``, HOST:PORT, once. Raises ``Unavailable`` if it cannot be resolved."""
        host, _, port = server.removeprefix("udp://").rpartition(":")
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            raise Unavailable(
                f"flag statsd_server_url={server}: {host} cannot be resolved ({error}); use another host, or omit the"
                " flag"
            ) from error
        self._prefix = prefix
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._address = address
        self._sent: dict[str, int] = {}  # counters at the last report
        self._failed = False

    def send(self, load: observe_pb2.Load) -> None:
        """Send the load in one or a few datagrams."""
        lines = list(self._lines(load))
        try:
            for datagram in _datagrams(lines):
                self._socket.sendto(datagram, self._address)
        except OSError as error:
            if not self._failed:  # logged once, since it may last for days
                log.warning("cannot send to statsd", reason=str(error))
            self._failed = True
        else:
            self._failed = False
        self._sent = _counts(load)

    def close(self) -> None:
        self._socket.close()

    def _lines(self, load: observe_pb2.Load) -> Iterator[str]:
        for name in _GAUGES:
            yield f"{self._prefix}.{name}:{getattr(load, name)}|g"
        yield f"{self._prefix}.kv_cache_usage:{load.in_use_pages / max(load.total_pages, 1):.4f}|g"
        yield f"{self._prefix}.step_ms:{load.step_ns * 1e-6:.3f}|g"
        for steps, pages in zip(load.forecast.steps, load.forecast.pages, strict=True):
            yield f"{self._prefix}.forecast_pages.{steps}:{pages}|g"
        for name, count in _counts(load).items():
            if more := count - self._sent.get(name, 0):
                yield f"{self._prefix}.{name}:{more}|c"


def _counts(load: observe_pb2.Load) -> dict[str, int]:
    """Return the counters by name, without those that are 0."""
    return {field.name: count for field, count in load.counters.ListFields()}


def _datagrams(lines: list[str]) -> Iterator[bytes]:
    """Yield the lines joined into as few datagrams as possible."""
    datagram = b""
    for line in map(str.encode, lines):
        if datagram and len(datagram) + 1 + len(line) > _MOST_BYTES:
            yield datagram
            datagram = b""
        datagram += b"\n" + line if datagram else line
    if datagram:
        yield datagram
