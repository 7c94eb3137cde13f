"""What ``/metrics`` of a scheduler shows, and what it tells statsd: its own load, by the names that gateways show."""

import socket
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotInTime

from prometheus_client.core import Metric

from services.common.metrics.replicas import Report, replica_metrics
from services.scheduler.api.encoding import encode_load
from services.scheduler.engine.loop import EngineLoop

_PATIENCE_S = 5.0


class OwnMetrics:
    """A Prometheus collector. ``collect`` runs in a thread of the page's, and waits for the step loop."""

    def __init__(self, engine: EngineLoop, model: str, address: str) -> None:
        self._engine, self._model, self._replica = engine, model, reachable(address)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape. Nothing when the step loop does not answer: its health says so."""
        try:
            load = self._engine.ask(lambda core: self._engine.load()).result(_PATIENCE_S)
        except NotInTime:
            return
        yield from replica_metrics([Report(self._replica, self._model, encode_load(load))])


def reachable(address: str) -> str:
    """By which others may know who listens on ``address``, such as 0.0.0.0:10310."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in ("0.0.0.0", "::") else address
