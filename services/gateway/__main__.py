"""``toka-gateway``: the OpenAI API over HTTP, in front of one scheduler or several."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from services.common.config import GatewayConfig
from services.common.errors import Unavailable
from services.common.process.handover import Handover, listen
from services.common.process.service import Stop, collect_every, collect_seldom, run_service
from services.common.process.watchdog_client import WatchdogClient
from services.gateway.app.admin import make_admin_app
from services.gateway.app.app import make_app
from services.gateway.batch.service import BatchService
from services.gateway.console.observer import Observer
from services.gateway.engine.session import Timings
from services.gateway.http.server import Server
from services.gateway.openai.gateway import Gateway
from services.gateway.rollout.repair import WeightsRepair

log = structlog.get_logger(__name__)

# Time to send an error to the requests that still run at the end of the drain.
LAST_WORD_S = 2.0
# A gateway that shares its port accepts the connections that are already in its queue for this time.
LAST_CALL_S = 0.5
# The listener opens when the facts of all schedulers are known, or after this time.
FIRST_LOOK_S = 1.0
# A request holds 100 to 140 objects while it runs and leaves no cycles behind. SQLAlchemy leaves cycles with each
# statement of the store, 300 objects a second in an idle gateway. They are garbage at once, so it is enough to examine
# each of the youngest objects once: 8 to 40 ms for 20,000. Only ``collect_every`` examines older objects.
COLLECT_AFTER = 20_000
NEVER = 1_000_000_000
COLLECT_EVERY_S = 60.0


async def serve(
    config: GatewayConfig,
    stop: Stop,
    *,
    handover: Handover | None = None,
    timings: Timings | None = None,
    on_listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Run a gateway until ``stop`` is set and its requests have ended.

    ``on_listening`` is called with the base URL when the gateway answers requests.
    """
    gateway = Gateway.make(config, timings or Timings(), handover)
    batches, observer = BatchService(gateway), Observer(gateway.fleet)
    sockets = [_listener(config, handover)]
    server = Server(
        config,
        make_app(gateway, batches, observer),
        make_admin_app(gateway, observer),
        _admin_listeners(config, handover),
        drain_s=config.drain_seconds + LAST_WORD_S,
        on_listening=lambda: _announce(config, sockets[0], handover, on_listening),
    )
    gateway.fleet.start()
    gateway.store.start(gateway.metrics.count_store_problem)
    batches.start()
    collect_seldom(COLLECT_AFTER, older_after=(NEVER, NEVER))
    collecting = asyncio.create_task(collect_every(COLLECT_EVERY_S))
    repairing = asyncio.create_task(WeightsRepair(gateway.fleet).run())
    leave = partial(handover.leave, sockets[0]) if handover is not None else lambda: False
    drain = asyncio.create_task(_drain(stop, leave, gateway, batches, server))
    try:
        await gateway.fleet.wait_known(FIRST_LOOK_S)
        await _while(gateway.fleet.watch_tasks(), server.serve(sockets=sockets))
        idle = asyncio.create_task(gateway.store.background_idle())
        await asyncio.wait([idle, drain], return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
    finally:
        drain.cancel()
        collecting.cancel()
        repairing.cancel()
        await batches.stop()
        await gateway.store.close()
        await gateway.fleet.stop()
        gateway.text.stop()
        if gateway.tracing is not None:
            await asyncio.to_thread(gateway.tracing.close)
        for each in sockets:
            each.close()


async def _while(condition: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end. If ``condition`` ends first, cancel ``work`` and raise the error of ``condition``."""
    tasks = asyncio.create_task(condition), asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listener(config: GatewayConfig, handover: Handover | None) -> socket.socket:
    """Return the socket for clients."""
    if handover is None:
        return listen(config.host, config.port)[0]
    return socket.socket(fileno=handover.listener)


def _admin_listeners(config: GatewayConfig, handover: Handover | None) -> list[socket.socket]:
    """Return the sockets for operators, and the socket on which ``toka`` probes this gateway alone."""
    listeners = []
    if config.admin_port:
        shared = handover is not None and handover.count > 1  # each gateway reports the metrics of all
        listeners += listen(config.admin_host, config.admin_port, flags=("admin_host", "admin_port"), joins=shared)
    if handover is not None:
        handover.own_socket.unlink(missing_ok=True)  # a gateway that was killed leaves its file
        own = socket.socket(socket.AF_UNIX)
        own.bind(str(handover.own_socket))
        listeners.append(own)
    return listeners


def _announce(
    config: GatewayConfig, listener: socket.socket, handover: Handover | None, on_listening: Callable[[str], None]
) -> None:
    if handover is not None:
        handover.join(listener)
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.http_cert is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    log.info("listening", url=url)
    on_listening(url)


async def _drain(
    stop: Stop, leave: Callable[[], bool], gateway: Gateway, batches: BatchService, server: Server
) -> None:
    """Drain the gateway after ``stop``.

    Close the listeners, let requests run for ``drain_seconds``, and then fail those that still run. ``leave`` closes
    the listener that is shared with other gateways, and returns whether there are others.
    """
    await stop.wait()
    drain_s, never = gateway.config.drain_seconds, asyncio.Event()
    log.info("draining", seconds=drain_s)
    last_call_s = 0.0
    if leave():
        server.leave_admin_port()
        last_call_s = min(LAST_CALL_S, drain_s)
    await stop.within(last_call_s, never.wait)
    gateway.fleet.draining = True
    server.should_exit = True
    await asyncio.gather(batches.stop(), stop.within(drain_s - last_call_s, never.wait))
    gateway.fleet.fail_all(Unavailable("the gateway is shutting down; send the request again"))


def main() -> None:
    """Run the ``toka-gateway`` command."""
    handover = Handover.read(os.environ)
    run_service("gateway" if handover is None else handover.name, GatewayConfig, partial(_watched, handover))


async def _watched(handover: Handover | None, config: GatewayConfig, stop: Stop) -> None:
    async with WatchdogClient(config, "event loop") as watchdog:
        await serve(config, stop, handover=handover, on_listening=lambda _: watchdog.serving())


if __name__ == "__main__":
    main()
