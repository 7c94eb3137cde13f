"""What ``/metrics`` shows of requests: counts and latencies. (What schedulers report is in ``replica_metrics``.)

Histograms are our own: a step brings the same gap for hundreds of samples, which is one observation with a weight here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from services.gateway.session.codec import Ending

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = tuple(float(2**power) for power in range(18))


class Histogram:
    """Counts of observed values by upper bound."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.name, self.documentation, self.bounds = name, documentation, bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """``times`` observations of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative."""
        buckets, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return HistogramMetricFamily(self.name, self.documentation, buckets=buckets, sum_value=self.total)


class RequestMetrics:
    """A Prometheus collector, fed on the gateway's event loop."""

    def __init__(self) -> None:
        self.first_token = Histogram("toka_time_to_first_token_seconds", "From the HTTP request to its first token")
        self.inter_token = Histogram("toka_inter_token_latency_seconds", "Between two tokens of a sample")
        self.end_to_end = Histogram("toka_e2e_request_latency_seconds", "From the HTTP request to its last token")
        self.queue_time = Histogram("toka_request_queue_time_seconds", "A sample's wait for its first plan")
        self.prefill_time = Histogram("toka_request_prefill_time_seconds", "From a sample's first plan to first token")
        self.decode_time = Histogram("toka_request_decode_time_seconds", "From a sample's first token to its last")
        self.prompt_tokens = Histogram("toka_request_prompt_tokens", "Tokens in a prompt", _TOKENS)
        self.generation_tokens = Histogram("toka_request_generation_tokens", "Tokens in a sample's answer", _TOKENS)
        self.finished: Counter[str] = Counter()  # samples by finish reason
        self.responses: Counter[tuple[str, str]] = Counter()  # (route, status)
        self.disconnects = 0

    def sample_finished(self, ending: Ending) -> None:
        """A sample ended that somebody still waited for."""
        self.finished[ending.reason] += 1
        if ending.error is None:
            self.queue_time.observe(ending.queued_s)
            self.prefill_time.observe(ending.prefill_s)
            self.decode_time.observe(ending.decode_s)
            self.prompt_tokens.observe(ending.prompt_tokens)
            self.generation_tokens.observe(ending.completion_tokens)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        for metric in vars(self).values():
            if isinstance(metric, Histogram):
                yield metric.family()
        finished = CounterMetricFamily("toka_request_success", "Samples that ended", labels=["finished_reason"])
        for reason, count in self.finished.items():
            finished.add_metric([reason], count)
        yield finished
        responses = CounterMetricFamily("toka_http_requests", "HTTP responses", labels=["route", "status"])
        for labels, count in self.responses.items():
            responses.add_metric(labels, count)
        yield responses
        yield CounterMetricFamily("toka_http_disconnects", "Requests whose client went away", value=self.disconnects)


def make_registry() -> CollectorRegistry:
    """A registry with the facts about this process in it."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
