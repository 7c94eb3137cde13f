"""The load of a scheduler as Prometheus metrics, with the same names as on a gateway's page."""

import socket
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError

from prometheus_client.core import Metric

from services.common.metrics.replicas import ReplicaReport, replica_metrics
from services.scheduler.engine.loop import EngineLoop

_TIMEOUT_S = 5.0


class SchedulerMetrics:
    """Prometheus collector. ``collect`` runs in a thread of the metrics page and waits for the step loop."""

    def __init__(self, engine: EngineLoop, model: str, address: str) -> None:
        self._engine, self._model, self._replica = engine, model, public_address(address)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for one scrape, or nothing if the step loop does not respond."""
        try:
            load = self._engine.ask(lambda core: self._engine.load()).result(_TIMEOUT_S)
        except FutureTimeoutError:
            return
        yield from replica_metrics([ReplicaReport(self._replica, self._model, load)])


def public_address(address: str) -> str:
    """Return ``address`` with the host's name in place of an unspecified address such as 0.0.0.0."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in ("0.0.0.0", "::") else address
