"""What ``/metrics`` shows of schedulers, one label ``replica`` (its address)."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from services.common.metrics.replicas import Report, replica_metrics
from services.gateway.engine.replica import Replica


class ReplicaMetrics:
    """A Prometheus collector over the replicas of this gateway."""

    def __init__(self, replicas: Sequence[Replica], *, figures: bool = True) -> None:
        """``figures``: show what schedulers tell of themselves; else only which are ready."""
        self._replicas = replicas
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape. A replica that never reported shows only that it is not ready."""
        ready = GaugeMetricFamily("toka_replica_ready", "1: takes requests", labels=["replica"])
        for replica in self._replicas:
            ready.add_metric([replica.address], float(replica.ready))
        yield ready
        if self._figures:
            yield from replica_metrics(
                Report(replica.address, replica.model.id, replica.load)
                for replica in self._replicas
                if replica.load is not None and replica.model is not None
            )
