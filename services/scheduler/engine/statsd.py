"""The load, told to a statsd server: gauges as they are, counters as what was added since the last time."""

import dataclasses
import socket
from collections.abc import Iterator

import structlog

from services.common.errors import Unavailable
from services.scheduler.core.step.load import Load

log = structlog.get_logger(__name__)

_MOST_BYTES = 1432  # of a datagram: what passes every Ethernet in one piece
_GAUGES = (
    "running_sequences", "waiting_sequences", "total_pages", "free_pages", "cached_pages", "in_use_pages",
    "outstanding_tokens", "plans_in_flight", "plans_ahead",
)  # fmt: skip


class Statsd:
    """Owned by the step loop's thread. Sending never waits: what the network does not take is lost, as it is with
    UDP."""

    def __init__(self, server: str, prefix: str) -> None:
        """``server``: HOST:PORT; the name is looked up here, once. Raises ``Unavailable`` when it is not known."""
        host, _, port = server.removeprefix("udp://").rpartition(":")
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            raise Unavailable(
                f"flag statsd_server_url={server}: {host} is not known ({error}); name a host that is, or leave it out"
            ) from error
        self._prefix = prefix
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._address = address
        self._told: dict[str, int] = {}  # counters
        self._failed = False

    def tell(self, load: Load) -> None:
        """One or a few datagrams."""
        lines = list(self._lines(load))
        try:
            for datagram in _datagrams(lines):
                self._socket.sendto(datagram, self._address)
        except OSError as error:
            if not self._failed:  # once: it may go on for days
                log.warning("statsd cannot be told", reason=str(error))
            self._failed = True
        else:
            self._failed = False
        self._told = dataclasses.asdict(load.counters)

    def close(self) -> None:
        self._socket.close()

    def _lines(self, load: Load) -> Iterator[str]:
        for name in _GAUGES:
            yield f"{self._prefix}.{name}:{getattr(load, name)}|g"
        yield f"{self._prefix}.kv_cache_usage:{load.in_use_pages / max(load.total_pages, 1):.4f}|g"
        yield f"{self._prefix}.step_ms:{load.step_ns * 1e-6:.3f}|g"
        for steps, pages in load.forecast:
            yield f"{self._prefix}.forecast_pages.{steps}:{pages}|g"
        for name, count in dataclasses.asdict(load.counters).items():
            if more := count - self._told.get(name, 0):
                yield f"{self._prefix}.{name}:{more}|c"


def _datagrams(lines: list[str]) -> Iterator[bytes]:
    """As few as hold the lines."""
    datagram = b""
    for line in map(str.encode, lines):
        if datagram and len(datagram) + 1 + len(line) > _MOST_BYTES:
            yield datagram
            datagram = b""
        datagram += b"\n" + line if datagram else line
    if datagram:
        yield datagram
