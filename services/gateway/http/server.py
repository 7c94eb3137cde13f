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
from services.gateway.http.connection import Clock, Connection, Patience
from services.gateway.http.reading import Backlog
from services.gateway.http.tls import Certificate

_TICKS = 10  # of uvicorn, one each 0.1 s: every open connection is swept once in this number of ticks
_LONGEST_TICK_S = 0.2
_LAST_ANSWERS_S = 1.0  # for operators, whose answers are short, at the very end


class Server(uvicorn.Server):
    """Serves ``app`` on the sockets given to ``serve``, by TLS where the flags say so, and ``admin`` on
    ``admin_sockets``, without. Says when it listens, and leaves signals to ``run_service``. While requests of ``app``
    still run at its end, it takes no more of them, and ``admin`` answers on."""

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
        patience = Patience.of(config)
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
        protocol: Any = partial(Connection, patience=patience, **shared)  # for uvicorn, a class of protocols
        super().__init__(uvicorn.Config(app, http=protocol, **settings, **tls))
        # Clients that take all places do not shut out operators and probes.
        protocol = partial(Connection, patience=patience._replace(max_connections=sys.maxsize), **shared)
        self._admin = uvicorn.Config(admin, http=protocol, **settings)
        self._admin_state = ServerState()
        self._make_admin = partial(protocol, self._admin, self._admin_state, {})
        self._admin_sockets = admin_sockets
        self._admin_servers: list[Acceptor] = []
        self._on_listening = on_listening
        self._unswept: list[Connection] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
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
        """Other gateways answer there from now on; on its unix socket this one still does."""
        for server in self._admin_servers:
            if any(each.family != socket.AF_UNIX for each in server.sockets):
                server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for server in self._admin_servers:
            server.close()
        for connection in list(self._admin_state.connections):
            connection.shutdown()
        if tasks := set(self._admin_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
        for task in self._admin_state.tasks:
            task.cancel()

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        self._clock.now += min(now - self._ticked_at, _LONGEST_TICK_S)
        self._ticked_at = now
        self._sweep_some()
        self._backlog.shed(self._clock.now)
        over = await super().on_tick(counter)
        self._admin_state.default_headers = self.server_state.default_headers
        return over

    def _sweep_some(self) -> None:
        """Sweep a tenth of the open connections, so that a tick stays short and each connection is swept about once a
        second. Connections that have closed since the round began do not count, else they would delay the others."""
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
        yield
