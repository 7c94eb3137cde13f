"""What ``/metrics`` shows of requests and gateways. (What schedulers report is in ``replica_metrics``.)

Histograms are our own: a step brings the same gap for hundreds of samples, which is one observation with a weight here.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.numbers import Numbers, counting_process
from services.gateway.session.codec import FINISH_REASONS, Ending

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = tuple(float(2**power) for power in range(18))
OTHER_ROUTE = "other"
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model_id:path}",
    "/v1/embeddings", "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items",
    "/tokenize", "/detokenize", "/version",
    "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
    "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel", "/v1/chat/completions/batch",
    "/health", "/ready", "/ping", "/metrics", OTHER_ROUTE,
)  # fmt: skip
_STATUSES = range(100, 600)
# Why a sample goes on at another scheduler, or at the same one again: the connection to it ended; it did not answer; it
# drained; its worker was away for long; it said that it cannot take it, or not go on with it, now.
FailoverReason = Literal["lost", "hung", "drained", "worker", "refused"]


class Histogram:
    """Counts of observed values by upper bound."""

    def __init__(
        self, name: str, documentation: str, bounds: tuple[float, ...] = _SECONDS, numbers: Numbers | None = None
    ) -> None:
        self.name, self.documentation, self.bounds = name, documentation, bounds
        numbers = numbers or Numbers()
        self.counts = numbers.take(len(bounds) + 1)  # the last: beyond all bounds
        self._total = numbers.take(1)

    def observe(self, value: float, times: int = 1) -> None:
        """``times`` observations of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self._total[0] += value * times

    def family(self) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative."""
        buckets, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return HistogramMetricFamily(self.name, self.documentation, buckets=buckets, sum_value=self._total[0])


class RequestMetrics:
    """A Prometheus collector, fed on the gateway's event loop. It keeps what it counts in ``numbers``."""

    def __init__(self, numbers: Numbers | None = None) -> None:
        numbers = numbers or Numbers()

        def histogram(name: str, documentation: str, bounds: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, documentation, bounds, numbers)

        self.first_token = histogram("toka_time_to_first_token_seconds", "From the HTTP request to its first token")
        self.inter_token = histogram("toka_inter_token_latency_seconds", "Between two tokens of a sample")
        self.end_to_end = histogram("toka_e2e_request_latency_seconds", "From the HTTP request to its last token")
        self.queue_time = histogram("toka_request_queue_time_seconds", "A sample's wait for its first plan")
        self.prefill_time = histogram("toka_request_prefill_time_seconds", "From a sample's first plan to first token")
        self.decode_time = histogram("toka_request_decode_time_seconds", "From a sample's first token to its last")
        self.prompt_tokens = histogram("toka_request_prompt_tokens", "Tokens in a prompt", _TOKENS)
        self.generation_tokens = histogram("toka_request_generation_tokens", "Tokens in a sample's answer", _TOKENS)
        self._finished = {reason: numbers.take(1) for reason in FINISH_REASONS}
        self._responses = {route: numbers.take(len(_STATUSES)) for route in ROUTES}
        self._disconnects = numbers.take(1)
        self._failovers = {reason: numbers.take(1) for reason in get_args(FailoverReason)}

    def sample_finished(self, ending: Ending) -> None:
        """A sample ended that somebody still waited for."""
        self._finished[ending.reason][0] += 1
        if ending.error is None:
            self.queue_time.observe(ending.queued_s)
            self.prefill_time.observe(ending.prefill_s)
            self.decode_time.observe(ending.decode_s)
            self.prompt_tokens.observe(ending.prompt_tokens)
            self.generation_tokens.observe(ending.completion_tokens)

    def count_response(self, route: str, status: int) -> None:
        """An HTTP response begins."""
        self._responses.get(route, self._responses[OTHER_ROUTE])[status - _STATUSES.start] += 1

    def count_disconnect(self) -> None:
        """A client went away before its answer was complete."""
        self._disconnects[0] += 1

    def count_failovers(self, reason: FailoverReason, samples: int) -> None:
        """Samples were sent again."""
        self._failovers[reason][0] += samples

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        for metric in vars(self).values():
            if isinstance(metric, Histogram):
                yield metric.family()
        finished = CounterMetricFamily("toka_request_success", "Samples that ended", labels=["finished_reason"])
        for reason, count in self._finished.items():
            finished.add_metric([reason], count[0])
        yield finished
        responses = CounterMetricFamily("toka_http_requests", "HTTP responses", labels=["route", "status"])
        for route, counts in self._responses.items():
            for index in np.flatnonzero(counts).tolist():
                responses.add_metric([route, str(_STATUSES[index])], counts[index])
        yield responses
        yield CounterMetricFamily(
            "toka_http_disconnects", "Requests whose client went away", value=self._disconnects[0]
        )
        failovers = CounterMetricFamily(
            "toka_failovers", "Samples sent to a scheduler again, to go on where they were", labels=["reason"]
        )
        for reason, count in self._failovers.items():
            failovers.add_metric([reason], count[0])
        yield failovers


class GatewayMetrics:
    """A Prometheus collector over all gateways of a deployment, each of which counts in one of ``paths``: the sums of
    their ``RequestMetrics``, and facts about each process."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        yield from RequestMetrics(Numbers.sum_of(self._paths)).collect()
        families: dict[str, Metric] = {}
        for index, path in enumerate(self._paths):
            pid = counting_process(path)
            for found in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect() if pid else ():
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {"gateway": str(index)}, sample.value)
        yield from families.values()


def make_registry(metrics: RequestMetrics, replicas: Collector, paths: Sequence[Path]) -> CollectorRegistry:
    """What ``/metrics`` shows. ``paths``: where the gateways of the deployment count, if there are several: whichever
    of them is asked answers for all."""
    registry = CollectorRegistry()
    registry.register(replicas)
    if paths:
        registry.register(GatewayMetrics(paths))
        return registry
    registry.register(metrics)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
