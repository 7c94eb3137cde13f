"""Metrics that schedulers report, with the label ``replica`` (the address)."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from services.common.metrics.replicas import ReplicaReport, replica_metrics
from services.gateway.engine.replica import Replica


class ReplicaMetrics:
    """A Prometheus collector over the replicas of this gateway."""

    def __init__(self, replicas: Sequence[Replica], *, figures: bool = True) -> None:
        """Create the collector. If not ``figures``, show only which replicas are ready."""
        self._replicas = replicas
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape. A replica without a report shows only that it is not ready."""
        ready = GaugeMetricFamily("toka_replica_ready", "1 if the replica accepts requests, else 0", labels=["replica"])
        for replica in self._replicas:
            ready.add_metric([replica.address], float(replica.ready))
        yield ready
        if self._figures:
            yield from replica_metrics(
                ReplicaReport(replica.address, replica.model.id, replica.load)
                for replica in self._replicas
                if replica.load is not None and replica.model is not None
            )
