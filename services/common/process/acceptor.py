"""Accepts connections, and stops accepting while file descriptors are short.

``asyncio`` accepts until the process has no descriptor left. Then it logs an error for each try, up to 65,535 times
because of our long backlog, and blocks the event loop meanwhile (Python 3.11 to 3.13).
"""

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable

import structlog

from services.common.host.descriptors import current_limit, next_number, reserve_of

log = structlog.get_logger(__name__)

_BATCH = 128  # connections accepted before the event loop runs other work
_RETRY_S = 0.1
_HANDSHAKE_S = 10.0  # limit of a TLS handshake, as on gRPC's ports
_LOG_EVERY_S = 60.0
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

ProtocolFactory = Callable[[], asyncio.Protocol]


class Acceptor:
    """Replacement for ``asyncio.Server`` with one listening socket. Used on the event loop.

    It stops accepting when the next descriptor would belong to the reserve. Clients then wait in the socket's queue.
    Connections for operators may use half of the reserve, so probes are answered while clients hold all other
    descriptors.
    """

    logged_at = -_LOG_EVERY_S  # shared by all acceptors

    def __init__(
        self,
        listener: socket.socket,
        factory: ProtocolFactory,
        *,
        backlog: int,
        context: ssl.SSLContext | None = None,
        for_operators: bool = False,
    ) -> None:
        """Start accepting on ``listener``. ``close`` closes it."""
        self.sockets = [listener]
        self._loop = asyncio.get_running_loop()
        self._listener, self._factory, self._context = listener, factory, context
        self._reserve_divisor = 2 if for_operators else 1
        self._retry: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting and close the socket. Connections stay open."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        self.sockets = []

    async def wait_closed(self) -> None:
        """Return at once, unlike ``asyncio.Server``. The owner of the factory closes the connections."""

    def _first_reserved(self) -> int:
        """Return the lowest descriptor number in the reserve. Another program may change the limit (prlimit)."""
        limit = current_limit()
        return limit - reserve_of(limit) // self._reserve_divisor

    def _accept(self) -> None:
        first_reserved = self._first_reserved()
        for _ in range(_BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORT:
                    raise
                self._pause()
                return
            connection.setblocking(False)
            connecting = self._loop.create_task(self._connect(connection))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)
            if connection.fileno() >= first_reserved:
                self._pause()
                return

    async def _connect(self, connection: socket.socket) -> None:
        timeout_s = None if self._context is None else _HANDSHAKE_S
        with contextlib.suppress(Exception):  # the client disconnected, or its TLS handshake failed
            await self._loop.connect_accepted_socket(
                self._factory, connection, ssl=self._context, ssl_handshake_timeout=timeout_s
            )

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._wait()

    def _wait(self) -> None:
        self._retry = self._loop.call_later(_RETRY_S, self._resume)
        now = time.monotonic()
        if now - Acceptor.logged_at >= _LOG_EVERY_S:
            Acceptor.logged_at = now
            log.warning(
                "file descriptors are short: new connections wait until others are closed",
                limit=current_limit(),
                reserved=current_limit() - self._first_reserved(),
                fix="raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)",
            )

    def _resume(self) -> None:
        self._retry = None
        with contextlib.suppress(OSError):
            if next_number(self._listener.fileno()) < self._first_reserved():
                self._loop.add_reader(self._listener, self._accept)
                return
        self._wait()
