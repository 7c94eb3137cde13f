"""Limits for slow clients: the rate at which they read responses, and the unsent bytes in memory."""

import asyncio
import socket
import struct
import time
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

MIN_READ_BYTES = 16 * 1024  # a client with unsent data must read this number of bytes in ``slow_client_seconds``
MAX_UNSENT_BYTES = 256 * 1024 * 1024  # of all connections
MAY_BE_BEHIND_S = 2.0  # a large response makes fast clients fall behind for a moment, too
_LOG_EVERY_S = 60.0
# struct tcp_info of Linux: ``tcpi_bytes_acked``, since 4.1.
_BYTES_ACKED = struct.Struct("=Q")
_BYTES_ACKED_OFFSET = 120
_TCP_INFO = getattr(socket, "TCP_INFO", None)


class Reading:
    """Measures how fast a client reads.

    A client is too slow if data was unsent during a whole period in which it read fewer than ``MIN_READ_BYTES``. While
    a response waits for tokens, nothing is unsent.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # start of the period; None: nothing is unsent
        self._taken = 0  # bytes read at the start of the period
        self._unsent = 0

    def is_too_slow(self, now: float, transport: asyncio.Transport, period_s: float) -> bool:
        """Return whether to disconnect the client. Called about once a second, with the time of ``Clock``."""
        if not (unsent := unsent_bytes(transport)):
            self._since = None
            return False
        taken = _bytes_taken(transport)
        progress = taken is None and unsent != self._unsent  # without the kernel's counter, any change counts
        if self._since is not None and not progress:
            if now - self._since <= period_s:
                return False
            if taken is None or taken - self._taken < MIN_READ_BYTES:
                return True
        self._since, self._taken, self._unsent = now, taken or 0, unsent
        return False


class _Behind(Protocol):
    transport: asyncio.Transport


class Backlog:
    """Connections with more unsent bytes than the transport's high-water mark. Runs on the event loop."""

    def __init__(self) -> None:
        self.connections: dict[_Behind, float] = {}  # to the time at which the client fell behind
        self._logged_at = -_LOG_EVERY_S

    def shed(self, now: float) -> None:
        """Disconnect the clients that have been behind longest, until the unsent bytes fit the limit."""
        if not self.connections:
            return
        unsent = {each: unsent_bytes(each.transport) for each in self.connections}
        total, ended = sum(unsent.values()), 0
        if total <= MAX_UNSENT_BYTES:
            return
        for connection, since in list(self.connections.items()):  # longest behind first
            if total <= MAX_UNSENT_BYTES or now - since < MAY_BE_BEHIND_S:
                break
            connection.transport.abort()
            total -= unsent[connection]
            ended += 1
        if ended and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning(
                "clients do not read their responses; the slowest are disconnected",
                clients=ended,
                unsent_bytes=total,
                most_bytes=MAX_UNSENT_BYTES,
            )


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the number of unsent bytes in memory."""
    tcp_transport = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)  # buffers encrypted data
    return sum(each.get_write_buffer_size() for each in (transport, tcp_transport) if each is not None)


def _bytes_taken(transport: asyncio.Transport) -> int | None:
    """Return the number of bytes that the client's host has acknowledged, or None if the kernel does not count them."""
    connection = transport.get_extra_info("socket")
    if _TCP_INFO is None or connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED_OFFSET + _BYTES_ACKED.size)
        (taken,) = _BYTES_ACKED.unpack_from(info, _BYTES_ACKED_OFFSET)
    except (OSError, struct.error):
        return None
    return int(taken)
