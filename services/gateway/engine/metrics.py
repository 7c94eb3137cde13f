"""Metrics of requests and gateways. Metrics that schedulers report are in ``replica_metrics``.

The client library's histograms are not used: one step gives the same latency for hundreds of samples, which is one
weighted observation here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.metrics.registry import registry_of
from services.gateway.engine.codec import FINISH_REASONS, SampleEnding
from services.gateway.engine.numbers import Numbers, counting_process

# Problems of a gateway's store. ``store.health`` has the advice for each.
StoreProblem = Literal["damaged", "locked", "full", "read_only", "missing", "newer", "error"]

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = tuple(float(2**power) for power in range(18))
# The bounds of vLLM's metrics, which are also exported under vLLM's names.
_KNOWN_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_KNOWN_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_KNOWN_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_KNOWN_TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))
_KNOWN_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_KNOWN_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
OTHER_ROUTE = "other"
_STATUSES = range(100, 600)
# Reason of a failover: the connection to the scheduler ended; the scheduler did not answer; it drained; its worker was
# unavailable for a long time; it refused the request or gave it up.
FailoverReason = Literal["lost", "hung", "drained", "worker", "refused"]


class Histogram:
    """Counts of observed values by upper bound, exported as ``toka_NAME``.

    The histogram is also exported under vLLM's names, ``vllm:NAME`` and ``older``, with vLLM's ``known_bounds``.
    """

    def __init__(
        self,
        numbers: Numbers,
        name: str,
        documentation: str,
        known_bounds: tuple[float, ...] = _KNOWN_LATENCY,
        bounds: tuple[float, ...] = _SECONDS,
        older: tuple[str, ...] = (),
    ) -> None:
        self.name, self.documentation = f"toka_{name}", documentation
        self.bounds, self._known_bounds = tuple(sorted({*bounds, *known_bounds})), known_bounds
        self.known_as = (f"vllm:{name}", *older)
        self.counts = numbers.take(len(self.bounds) + 1)  # the last one counts values above all bounds
        self._total = numbers.take(1)

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``times`` observations of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self._total[0] += value * times

    def family(self) -> HistogramMetricFamily:
        """Return the cumulative histogram."""
        family = HistogramMetricFamily(self.name, self.documentation)
        family.add_metric([], self._buckets(self.bounds), self._total[0])
        return family

    def known_families(self, model: str) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram under each name in ``known_as``."""
        for name in self.known_as:
            family = HistogramMetricFamily(name, self.documentation, labels=["model_name"])
            family.add_metric([model], self._buckets(self._known_bounds), self._total[0])
            yield family

    def _buckets(self, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
        upto = dict(zip((*self.bounds, inf), accumulate(self.counts), strict=True))
        return [("+Inf" if bound == inf else str(bound), upto[bound]) for bound in (*bounds, inf)]


class RequestMetrics:
    """Metrics of a gateway's requests, counted in ``numbers`` on the event loop."""

    def __init__(self, numbers: Numbers | None = None) -> None:
        numbers = numbers or Numbers()
        histogram = partial(Histogram, numbers)
        tokens = partial(histogram, known_bounds=_KNOWN_TOKENS, bounds=_TOKENS)
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from the HTTP request to its first token", _KNOWN_FIRST_TOKEN
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a sample",
            _KNOWN_INTER_TOKEN,
            older=("vllm:time_per_output_token_seconds",),
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "Time from the HTTP request to its last token")
        self.queue_time = histogram("request_queue_time_seconds", "Time from a sample's arrival to its first plan")
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "Time from a sample's first plan to its first token"
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Time from a sample's first token to its last token"
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "Time from a sample's first plan to its last token"
        )
        self.prompt_tokens = tokens("request_prompt_tokens", "Tokens in a prompt")
        self.generation_tokens = tokens("request_generation_tokens", "Tokens in a sample's answer")
        self.params_n = histogram("request_params_n", "Samples requested per prompt", _KNOWN_SAMPLES, _TOKENS[:15])
        self.params_max_tokens = tokens("request_params_max_tokens", "Requested limit of tokens per answer")
        self.preemptions = histogram(
            "request_num_preemptions", "Times a sample was preempted", _KNOWN_PREEMPTIONS, _KNOWN_PREEMPTIONS
        )
        self._finished = {reason: numbers.take(1) for reason in FINISH_REASONS}
        self._disconnects = numbers.take(1)
        self._failovers = {reason: numbers.take(1) for reason in get_args(FailoverReason)}
        self._store_problems = {problem: numbers.take(1) for problem in get_args(StoreProblem)}
        self._numbers = numbers
        self._responses = {OTHER_ROUTE: numbers.take(len(_STATUSES))}

    def add_routes(self, routes: Sequence[str]) -> None:
        """Count the responses of ``routes`` under their own names. All gateways add the same routes in one order."""
        self._responses |= {route: self._numbers.take(len(_STATUSES)) for route in routes}

    @property
    def routes(self) -> list[str]:
        """The routes that were added."""
        return [route for route in self._responses if route != OTHER_ROUTE]

    def sample_finished(self, ending: SampleEnding) -> None:
        """Count a sample that ended and was not cancelled."""
        self._finished[ending.reason][0] += 1
        if ending.error is None:
            self.queue_time.observe(ending.queued_s)
            self.prefill_time.observe(ending.prefill_s)
            self.decode_time.observe(ending.decode_s)
            self.inference_time.observe(ending.prefill_s + ending.decode_s)
            self.prompt_tokens.observe(ending.prompt_tokens)
            self.generation_tokens.observe(ending.completion_tokens)
            self.preemptions.observe(ending.preemptions)

    def request_began(self, samples: int, max_tokens: int, prompts: int = 1) -> None:
        """Count ``prompts`` that are sent to a scheduler, with ``samples`` per prompt and ``max_tokens`` per sample."""
        self.params_n.observe(samples, prompts)
        self.params_max_tokens.observe(max_tokens, prompts)

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP response that begins."""
        self._responses.get(route, self._responses[OTHER_ROUTE])[status - _STATUSES.start] += 1

    def count_disconnect(self) -> None:
        """Count a client that disconnected before its response was complete."""
        self._disconnects[0] += 1

    def count_failovers(self, reason: FailoverReason, samples: int) -> None:
        """Count samples that were sent again."""
        self._failovers[reason][0] += samples

    def count_store_problem(self, problem: StoreProblem) -> None:
        """Count an access to the store that failed."""
        self._store_problems[problem][0] += 1

    def families(self, model: str) -> Iterator[Metric]:
        """Yield the metrics of one scrape.

        ``model`` is the name of the served model. While it is empty, metrics with a model label are omitted.
        """
        for metric in vars(self).values():
            if isinstance(metric, Histogram):
                yield metric.family()
                if model:
                    yield from metric.known_families(model)
        yield _counter("toka_request_success", "Samples that ended", ["finished_reason"], _labelled(self._finished))
        if model:
            counts = {reason: count[0] for reason, count in self._finished.items()}
            counts["abort"] += self._disconnects[0]
            yield _counter(
                "vllm:request_success",
                "Samples that ended. abort: also requests whose client disconnected",
                ["model_name", "finished_reason"],
                ((model, *each) for each in counts.items()),
            )
        responses = (
            (route, str(_STATUSES[index]), counts[index])
            for route, counts in self._responses.items()
            for index in np.flatnonzero(counts).tolist()
        )
        yield _counter("toka_http_requests", "HTTP responses", ["route", "status"], responses)
        disconnects = [(self._disconnects[0],)]
        yield _counter("toka_http_disconnects", "Requests whose client disconnected", [], disconnects)
        yield _counter(
            "toka_failovers",
            "Samples sent to a scheduler again, which continues them",
            ["reason"],
            _labelled(self._failovers),
        )
        problems = _labelled(self._store_problems)
        yield _counter(
            "toka_store_errors", "Failed accesses to the store of files and Batch jobs", ["problem"], problems
        )


def _labelled(counts: Mapping[Any, "memoryview[float]"]) -> Iterator[tuple[str, float]]:
    return ((label, count[0]) for label, count in counts.items())


def _counter(
    name: str, documentation: str, labels: Sequence[str], values: Iterable[tuple[*tuple[str, ...], float]]
) -> CounterMetricFamily:
    """Return a counter. Each of ``values`` has the values of the labels, and the count."""
    family = CounterMetricFamily(name, documentation, labels=labels)
    for *given, count in values:
        family.add_metric(given, count)
    return family


class RequestCollector:
    """A Prometheus collector for the requests of a deployment, of which ``own`` are those of this gateway.

    If the deployment has several gateways, each counts in one of ``paths``. The metrics are then the sums over all
    gateways, followed by metrics of each process. ``model`` returns the name of the served model.
    """

    def __init__(self, own: RequestMetrics, paths: Sequence[Path], model: Callable[[], str]) -> None:
        self._own, self._paths, self._model = own, paths, model

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        total = self._own
        if self._paths:
            total = RequestMetrics(Numbers.sum_of(self._paths))
            total.add_routes(self._own.routes)
        yield from total.families(self._model())
        families: dict[str, Metric] = {}
        for index, path in enumerate(self._paths):
            pid = counting_process(path)
            for found in ProcessCollector(pid=partial(int, pid), registry=None).collect() if pid else ():
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {"gateway": str(index)}, sample.value)
        yield from families.values()


def make_registry(
    metrics: RequestMetrics, replicas: Collector, paths: Sequence[Path], model: Callable[[], str] = str
) -> CollectorRegistry:
    """Return the registry behind ``/metrics``.

    ``paths`` are the files in which the gateways of the deployment count, if there are several. Each of them shows the
    metrics of all. ``model`` returns the name of the served model, or an empty string while it is not known.
    """
    collectors = [replicas, RequestCollector(metrics, paths, model)]
    if not paths:
        return registry_of(collectors)
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry
