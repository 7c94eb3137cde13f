"""``toka-gateway``: the OpenAI API over HTTP, in front of one scheduler or several."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.config import GatewayConfig
from services.common.errors import Unavailable
from services.common.handover import BACKLOG, Handover, listen
from services.common.process import allow_connections, collect_seldom, run_service
from services.gateway.app import make_app
from services.gateway.gateway import Gateway
from services.gateway.session.client import Timings

log = structlog.get_logger(__name__)

# After SIGTERM running requests have so long to end; then they are told that the gateway is going, and so long to hear.
DRAIN_S = 5.0
LAST_WORD_S = 2.0
# Longer than the pools of clients keep an idle connection, so that none is closed under a request.
KEEP_ALIVE_S = 120
# Who asks a gateway that has just started is answered when it knows its schedulers, or after so long.
FIRST_LOOK_S = 1.0
# A request holds some 100 objects while it runs, and leaves no cycles of them behind.
COLLECT_AFTER = 1_000_000


class _Connection(HttpToolsProtocol):
    """One client's connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        transport = self.transport
        super().connection_lost(exc)
        if sys.version_info < (3, 12):
            transport._read_ready_cb = None  # its own method: a circle, which later versions open themselves


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to ``run_service``."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(
    config: GatewayConfig,
    stop: asyncio.Event,
    *,
    handover: Handover | None = None,
    timings: Timings | None = None,
    on_listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Run a gateway until ``stop`` is set. ``on_listening`` gets its base URL once requests are answered."""
    gateway = Gateway.make(config, timings or Timings(), handover)
    allow_connections()
    sockets = listen(config.host, config.port) if handover is None else _handed_over(handover)
    server = _Server(
        uvicorn.Config(
            make_app(gateway),
            http=_Connection,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(DRAIN_S + LAST_WORD_S),
        ),
        lambda: _announce(sockets[0], on_listening),
    )
    gateway.fleet.start()
    gateway.batches.start(gateway)
    collect_seldom(COLLECT_AFTER)
    drain = asyncio.create_task(_drain(stop, gateway, server))
    try:
        await gateway.fleet.known(FIRST_LOOK_S)
        await server.serve(sockets=sockets)
    finally:
        drain.cancel()
        await gateway.batches.stop()
        await gateway.batches.close()
        await gateway.fleet.stop()
        gateway.text.stop()
        for each in sockets:
            each.close()


def _handed_over(handover: Handover) -> list[socket.socket]:
    """The socket for clients, and the one on which ``toka`` asks this gateway and no other."""
    handover.own_socket.unlink(missing_ok=True)  # of one that died
    own = socket.socket(socket.AF_UNIX)
    own.bind(str(handover.own_socket))
    return [socket.socket(fileno=handover.listener), own]


def _announce(listener: socket.socket, on_listening: Callable[[str], None]) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("listening", url=url)
    on_listening(url)


async def _drain(stop: asyncio.Event, gateway: Gateway, server: uvicorn.Server) -> None:
    """At ``stop``: no new connections, time for what runs, then an error for what still runs."""
    await stop.wait()
    log.info("shutting down")
    gateway.fleet.draining = True
    server.should_exit = True
    drained = asyncio.get_running_loop().time() + DRAIN_S
    await gateway.batches.stop()
    await asyncio.sleep(drained - asyncio.get_running_loop().time())
    gateway.fleet.fail_all(Unavailable("the gateway is shutting down; send the request again"))


def main() -> None:
    """The ``toka-gateway`` command."""
    handover = Handover.read(os.environ)
    run_service("gateway" if handover is None else handover.name, GatewayConfig, partial(serve, handover=handover))


if __name__ == "__main__":
    main()
