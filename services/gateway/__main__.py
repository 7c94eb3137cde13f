"""``toka-gateway``: the OpenAI API over HTTP, in front of one scheduler or several."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import structlog
import uvicorn

from services.common.config import GatewayConfig
from services.common.errors import Unavailable
from services.common.process import collect_seldom, run_service
from services.gateway.app import make_app
from services.gateway.gateway import Gateway
from services.gateway.session.client import Timings

log = structlog.get_logger(__name__)

# After SIGTERM running requests have so long to end; then they are told that the gateway is going, and so long to hear.
DRAIN_S = 5.0
LAST_WORD_S = 2.0
# Longer than the pools of clients keep an idle connection, so that none is closed under a request.
KEEP_ALIVE_S = 120
BACKLOG = 4096


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
    timings: Timings | None = None,
    on_listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Run a gateway until ``stop`` is set. ``on_listening`` gets its base URL once requests are answered."""
    gateway = Gateway.make(config, timings or Timings())
    listener = _listen(config.host, config.port)
    server = _Server(
        uvicorn.Config(
            make_app(gateway),
            http="httptools",
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(DRAIN_S + LAST_WORD_S),
        ),
        lambda: _announce(listener, on_listening),
    )
    gateway.fleet.start()
    collect_seldom()
    drain = asyncio.create_task(_drain(stop, gateway, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        drain.cancel()
        await gateway.fleet.stop()
        gateway.text.stop()
        listener.close()


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
    await asyncio.sleep(DRAIN_S)
    gateway.fleet.fail_all(Unavailable("the gateway is shutting down; send the request again"))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error}; choose another host= or port=") from error
    return listener


def main() -> None:
    """The ``toka-gateway`` command."""
    run_service("gateway", GatewayConfig, serve)


if __name__ == "__main__":
    main()
