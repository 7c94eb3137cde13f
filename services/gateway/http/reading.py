"""Bounds on slow clients: the rate at which they read responses, and the bytes that wait for them in memory."""

import asyncio
import socket
import struct
import time
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

LEAST_BYTES = 16 * 1024  # that a client which is behind reads in ``slow_client_seconds``; as of the bodies it sends
MOST_UNSENT_BYTES = 256 * 1024 * 1024  # of all connections
MAY_BE_BEHIND_S = 2.0  # fast clients are, for a moment, when a large response is written at once
_LOG_EVERY_S = 60.0
# struct tcp_info of Linux: ``tcpi_bytes_acked``, since 4.1.
_BYTES_ACKED = struct.Struct("=Q")
_BYTES_ACKED_OFFSET = 120
_TCP_INFO = getattr(socket, "TCP_INFO", None)


class Reading:
    """One client's reading. It is too slow if data has waited for it during a whole period of which it took fewer than
    ``LEAST_BYTES``. A response that waits for tokens has nothing to send and is never too slow."""

    def __init__(self) -> None:
        self._since: float | None = None  # data has waited; None: none does
        self._taken = 0  # bytes, at that time
        self._unsent = 0

    def is_too_slow(self, now: float, transport: asyncio.Transport, period_s: float) -> bool:
        """Return whether to cut the client off. To be called about once a second, with the event loop's clock."""
        if not (unsent := unsent_bytes(transport)):
            self._since = None
            return False
        taken = _bytes_taken(transport)
        progress = taken is None and unsent != self._unsent  # where the kernel does not count, any will do
        if self._since is not None and not progress:
            if now - self._since <= period_s:
                return False
            if taken is None or taken - self._taken < LEAST_BYTES:
                return True
        self._since, self._taken, self._unsent = now, taken or 0, unsent
        return False


class _Behind(Protocol):
    transport: asyncio.Transport


class Backlog:
    """Connections whose clients are behind: more is to be sent than the transport's high-water mark. Lives on the event
    loop."""

    def __init__(self) -> None:
        self.connections: dict[_Behind, float] = {}  # since when, by the event loop's clock
        self._logged_at = -_LOG_EVERY_S

    def shed(self, now: float) -> None:
        """Cut off clients that have been behind for longest, until the data that waits for clients fits its bound."""
        if not self.connections:
            return
        unsent = {each: unsent_bytes(each.transport) for each in self.connections}
        total, ended = sum(unsent.values()), 0
        if total <= MOST_UNSENT_BYTES:
            return
        for connection, since in list(self.connections.items()):  # the first came first
            if total <= MOST_UNSENT_BYTES or now - since < MAY_BE_BEHIND_S:
                break
            connection.transport.abort()
            total -= unsent[connection]
            ended += 1
        if ended and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning(
                "clients do not read their responses: the slowest are cut off",
                clients=ended,
                unsent_bytes=total,
                most_bytes=MOST_UNSENT_BYTES,
            )


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Return how many bytes wait in memory for the client."""
    beneath = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)  # has what is encrypted
    return sum(each.get_write_buffer_size() for each in (transport, beneath) if each is not None)


def _bytes_taken(transport: asyncio.Transport) -> int | None:
    """Return how many bytes the client's host has taken since it connected. None: this kernel or socket does not
    count."""
    connection = transport.get_extra_info("socket")
    if _TCP_INFO is None or connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED_OFFSET + _BYTES_ACKED.size)
        (taken,) = _BYTES_ACKED.unpack_from(info, _BYTES_ACKED_OFFSET)
    except (OSError, struct.error):
        return None
    return int(taken)
