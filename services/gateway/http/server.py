"""The HTTP server of a gateway: its sockets, and the sweeps that end slow connections."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from services.common.config import GatewayConfig
from services.common.process.acceptor import Acceptor
from services.common.process.handover import BACKLOG
from services.gateway.http.connection import Clock, Connection, ConnectionLimits
from services.gateway.http.reading import Backlog
from services.gateway.http.tls import Certificate

_TICKS = 10  # uvicorn ticks of 0.1 s in which every open connection is swept once
_LONGEST_TICK_S = 0.2
_ADMIN_DRAIN_S = 1.0  # time for the last responses on the admin port, which are short


class Server(uvicorn.Server):
    """Serves ``app`` on the sockets given to ``serve``, and ``admin`` on ``admin_sockets``.

    ``app`` uses TLS if the flags name a certificate. ``admin`` does not. ``on_listening`` is called when the server
    listens. ``run_service`` handles signals. While the server drains, it accepts no more connections for ``app``, and
    ``admin`` continues to respond.
    """

    def __init__(
        self,
        config: GatewayConfig,
        app: ASGIApp,
        admin: ASGIApp,
        admin_sockets: Sequence[socket.socket],
        *,
        drain_s: float,
        on_listening: Callable[[], None],
    ) -> None:
        self._clock, self._ticked_at, self._backlog = Clock(), time.monotonic(), Backlog()
        limits = ConnectionLimits.of(config)
        settings: dict[str, Any] = {
            "ws": "none",
            "loop": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "backlog": BACKLOG,
            "timeout_keep_alive": config.keep_alive_seconds,
            "timeout_graceful_shutdown": int(drain_s),
        }
        tls: dict[str, Any] = {}
        if config.http_cert is not None and config.http_key is not None:
            certificate = Certificate(config.http_cert, config.http_key)
            tls["ssl_context_factory"] = lambda *_: certificate.context
        shared: dict[str, Any] = {"clock": self._clock, "backlog": self._backlog}
        protocol: Any = partial(Connection, limits=limits, **shared)  # for uvicorn, a class of protocols
        super().__init__(uvicorn.Config(app, http=protocol, **settings, **tls))
        # Clients that use all connections must not lock out operators and probes.
        protocol = partial(Connection, limits=limits._replace(max_connections=sys.maxsize), **shared)
        self._admin = uvicorn.Config(admin, http=protocol, **settings)
        self._admin_state = ServerState()
        self._make_admin = partial(protocol, self._admin, self._admin_state, {})
        self._admin_sockets = admin_sockets
        self._admin_servers: list[Acceptor] = []
        self._on_listening = on_listening
        self._unswept: list[Connection] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and call ``on_listening``."""
        await super().startup([])
        protocol: Any = self.config.http_protocol_class  # a partial of ``Connection``
        make_connection = partial(protocol, self.config, self.server_state, self.lifespan.state)
        acceptors: Any = [
            Acceptor(each, make_connection, backlog=BACKLOG, context=self.config.ssl) for each in sockets or []
        ]
        self.servers = acceptors  # for uvicorn, asyncio's servers
        self._admin.load()
        for each in self._admin_sockets:
            acceptor = Acceptor(each, self._make_admin, backlog=BACKLOG, for_operators=True)
            self._admin_servers.append(acceptor)
        if self.started:
            self._on_listening()

    def leave_admin_port(self) -> None:
        """Stop listening on the admin port, where other gateways respond, but not on the Unix socket."""
        for server in self._admin_servers:
            if any(each.family != socket.AF_UNIX for each in server.sockets):
                server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain ``app``, then ``admin``."""
        await super().shutdown(sockets)
        for server in self._admin_servers:
            server.close()
        for connection in list(self._admin_state.connections):
            connection.shutdown()
        if tasks := set(self._admin_state.tasks):
            await asyncio.wait(tasks, timeout=_ADMIN_DRAIN_S)
        for task in self._admin_state.tasks:
            task.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Sweep slow connections. Return whether the server should stop."""
        now = time.monotonic()
        self._clock.now += min(now - self._ticked_at, _LONGEST_TICK_S)
        self._ticked_at = now
        self._sweep_some()
        self._backlog.shed(self._clock.now)
        over = await super().on_tick(counter)
        self._admin_state.default_headers = self.server_state.default_headers
        return over

    def _sweep_some(self) -> None:
        """Sweep a tenth of the open connections, so that each is swept about once a second and ticks stay short.

        Connections that have closed since do not count, since they would delay the others.
        """
        connections = [self.server_state.connections, self._admin_state.connections]
        if not self._unswept:
            self._unswept = [each for some in connections for each in some if isinstance(each, Connection)]
        left = sum(map(len, connections)) // _TICKS + 1
        while self._unswept and left:
            connection = self._unswept.pop()
            if connection in connection.connections:
                connection.sweep()
                left -= 1

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to ``run_service``."""
        yield
