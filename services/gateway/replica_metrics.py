"""What ``/metrics`` shows of schedulers: their latest Load, one label ``replica`` (its address)."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.gateway.session.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

_GAUGES: tuple[tuple[str, str, Callable[[observe_pb2.Load], float]], ...] = (
    ("toka_num_requests_running", "Sequences running", lambda load: load.running_sequences),
    ("toka_num_requests_waiting", "Sequences accepted and not yet running", lambda load: load.waiting_sequences),
    ("toka_kv_pages_total", "KV pages there are", lambda load: load.total_pages),
    ("toka_kv_pages_free", "KV pages that hold nothing", lambda load: load.free_pages),
    ("toka_kv_pages_cached", "KV pages kept for their prefix, free when needed", lambda load: load.cached_pages),
    ("toka_kv_pages_in_use", "KV pages held by sequences", lambda load: load.in_use_pages),
    ("toka_kv_page_size_tokens", "Tokens in a KV page", lambda load: load.page_size),
    (
        "toka_kv_cache_usage_perc",
        "Share of the KV pages held by sequences, 0 to 1",
        lambda load: load.in_use_pages / max(load.total_pages, 1),
    ),
    ("toka_outstanding_tokens", "Tokens still to compute at most", lambda load: load.outstanding_tokens),
    ("toka_plans_in_flight", "Plans sent to the worker and not yet answered", lambda load: load.plans_in_flight),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("toka_steps", "Model steps", "steps"),
    ("toka_prompt_tokens", "Prompt tokens of accepted requests", "prompt_tokens"),
    ("toka_generation_tokens", "Tokens delivered", "generated_tokens"),
    ("toka_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prompt_tokens"),
    ("toka_prefix_cache_hits", "Prompt tokens not computed: cached or shared with a sibling", "cached_prompt_tokens"),
    ("toka_wasted_tokens", "Tokens computed after their sample had ended", "wasted_tokens"),
    ("toka_num_preemptions", "Sequences put back into the queue for their pages", "preemptions"),
    ("toka_yields", "Sequences of class low put back into the queue to make way for a higher class", "yields"),
    ("toka_recomputed_tokens", "Tokens computed again after either, or a lost worker", "recomputed_tokens"),
    ("toka_queue_overtakes", "Sequences admitted ahead of a queue head that did not fit", "overtakes"),
    ("toka_postponed_plans", "Plans sent without onboarding: the worker was about to run dry", "postponed_plans"),
    ("toka_batch_rows", "Rows of all steps: one for each sequence in the step", "batch_rows"),
    ("toka_hydragen_rows", "Rows that ran in a Hydragen group, of toka_batch_rows", "hydragen_rows"),
    ("toka_requests_accepted", "Requests accepted", "requests_accepted"),
    ("toka_admission_rejections", "Requests rejected", "requests_rejected"),
    ("toka_sequences_finished", "Sequences that ended by themselves", "sequences_finished"),
    ("toka_sequences_cancelled", "Sequences cancelled", "sequences_cancelled"),
    ("toka_worker_restarts", "Times the worker came back as another process", "worker_restarts"),
)
_SECONDS: tuple[tuple[str, str, str], ...] = (
    ("toka_device_busy_seconds", "The worker's device worked on steps; 0 where it is not measured", "device_busy_ns"),
    ("toka_device_idle_seconds", "It waited for the host between two steps that were both planned", "device_idle_ns"),
)


class ReplicaMetrics:
    """A Prometheus collector over the replicas of this gateway."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape. A replica that never reported shows only that it is not ready."""
        ready = GaugeMetricFamily("toka_replica_ready", "1: takes requests", labels=["replica"])
        for replica in self._replicas:
            ready.add_metric([replica.address], float(replica.ready))
        yield ready
        yield from chain(self._gauges(), self._counters())

    def _gauges(self) -> Iterator[Metric]:
        for name, documentation, read in _GAUGES:
            family = GaugeMetricFamily(name, documentation, labels=["replica"])
            for replica in self._replicas:
                if replica.load is not None:
                    family.add_metric([replica.address], read(replica.load))
            yield family

    def _counters(self) -> Iterator[Metric]:
        for scale, rows in ((1, _COUNTERS), (1e-9, _SECONDS)):
            for name, documentation, attribute in rows:
                family = CounterMetricFamily(name, documentation, labels=["replica"])
                for replica in self._replicas:
                    if replica.load is not None:
                        family.add_metric([replica.address], scale * getattr(replica.load.counters, attribute))
                yield family
