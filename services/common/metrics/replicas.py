"""Metrics of schedulers, from their latest ``Load`` messages, for the pages of gateways and schedulers.

Metrics that vLLM has too are also published under vLLM's names.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tokasaurus.scheduler.v1 import observe_pb2


class ReplicaReport(NamedTuple):
    """Latest load of one scheduler."""

    replica: str  # its address
    model: str
    load: observe_pb2.Load


class _Figure(NamedTuple):
    """A gauge or a counter with one value for each scheduler."""

    name: str
    documentation: str
    read: str | Callable[[observe_pb2.Load], float]  # from a load; or the name of a field of its counters
    vllm_names: tuple[str, ...] = ()  # further names, as in vLLM
    scale: float = 1  # of a field


_GAUGES = (
    _Figure(
        "toka_num_requests_running",
        "Sequences running",
        lambda load: load.running_sequences,
        ("vllm:num_requests_running",),
    ),
    _Figure(
        "toka_num_requests_waiting",
        "Sequences accepted and not yet running",
        lambda load: load.waiting_sequences,
        ("vllm:num_requests_waiting",),
    ),
    _Figure("toka_num_requests_parked", "Parked sequences that do not run", lambda load: load.parked_sequences),
    _Figure("toka_kv_pages_total", "KV pages in total", lambda load: load.total_pages),
    _Figure("toka_kv_pages_free", "Empty KV pages", lambda load: load.free_pages),
    _Figure("toka_kv_pages_cached", "KV pages of cached prefixes, evicted when needed", lambda load: load.cached_pages),
    _Figure("toka_kv_pages_in_use", "KV pages held by sequences", lambda load: load.in_use_pages),
    _Figure("toka_kv_page_size_tokens", "Tokens in a KV page", lambda load: load.page_size),
    _Figure(
        "toka_kv_cache_usage_perc",
        "Share of the KV pages held by sequences, 0 to 1",
        lambda load: load.in_use_pages / max(load.total_pages, 1),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    _Figure(
        "toka_outstanding_tokens", "Upper bound of the tokens still to compute", lambda load: load.outstanding_tokens
    ),
    _Figure(
        "toka_plans_in_flight", "Plans sent to the worker that have no result yet", lambda load: load.plans_in_flight
    ),
    _Figure("toka_plans_ahead", "Limit of plans in flight", lambda load: load.plans_ahead),
    _Figure("toka_paused", "1 if the scheduler is paused, else 0", lambda load: load.paused),
    _Figure(
        "toka_sleeping",
        "1 if the scheduler's workers are asleep, in whole or in part, else 0",
        lambda load: load.asleep,
    ),
    _Figure("toka_step_seconds", "Recent duration of a model step", lambda load: load.step_ns * 1e-9),
)
_COUNTERS = (
    _Figure("toka_steps", "Model steps", "steps"),
    _Figure("toka_step_tokens", "Tokens of all model steps: prefilled, decoded, and computed again", "step_tokens"),
    _Figure("toka_wasted_steps", "Steps that computed tokens of finished samples only", "wasted_steps"),
    _Figure("toka_prompt_tokens", "Prompt tokens of accepted requests", "prompt_tokens", ("vllm:prompt_tokens",)),
    _Figure("toka_generation_tokens", "Tokens delivered", "generated_tokens", ("vllm:generation_tokens",)),
    _Figure(
        "toka_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache, counted for each sample",
        "looked_up_prompt_tokens",
        ("vllm:prefix_cache_queries",),
    ),
    _Figure(
        "toka_prefix_cache_hits",
        "Prompt tokens not computed because they were cached or shared with a sibling",
        "cached_prompt_tokens",
        ("vllm:prefix_cache_hits",),
    ),
    _Figure("toka_wasted_tokens", "Tokens computed after their sample had finished", "wasted_tokens"),
    _Figure(
        "toka_num_preemptions",
        "Sequences preempted to free their pages",
        "preemptions",
        ("vllm:num_preemptions",),
    ),
    _Figure("toka_yields", "Preempted sequences: for a higher class, for another key, and parked ones", "yields"),
    _Figure(
        "toka_recomputed_tokens",
        "Tokens computed again after a preemption or the loss of a worker",
        "recomputed_tokens",
    ),
    _Figure("toka_queue_overtakes", "Sequences admitted before a queue head that did not fit", "overtakes"),
    _Figure(
        "toka_postponed_plans",
        "Plans sent without new sequences because the worker was about to become idle",
        "postponed_plans",
    ),
    _Figure("toka_batch_rows", "Rows of all steps: one for each sequence in the step", "batch_rows"),
    _Figure("toka_hydragen_rows", "Rows of toka_batch_rows that ran in a Hydragen group", "hydragen_rows"),
    _Figure(
        "toka_tail_rows",
        "Rows of toka_batch_rows of samples in the tail of their group: at most a tenth of it, or one, has not ended",
        "tail_rows",
    ),
    _Figure("toka_tail_steps", "Steps that had only rows of toka_tail_rows", "tail_steps"),
    _Figure("toka_requests_accepted", "Requests accepted", "requests_accepted"),
    _Figure("toka_admission_rejections", "Requests rejected", "requests_rejected"),
    _Figure("toka_sequences_finished", "Sequences that finished without being cancelled", "sequences_finished"),
    _Figure("toka_sequences_cancelled", "Sequences cancelled", "sequences_cancelled"),
    _Figure("toka_worker_restarts", "Restarts of the worker process", "worker_restarts"),
    _Figure(
        "toka_device_busy_seconds",
        "Time in which the worker's device ran steps; 0 if not measured",
        "device_busy_ns",
        scale=1e-9,
    ),
    _Figure(
        "toka_device_idle_seconds",
        "Time in which the device waited although there was work for the next step",
        "device_idle_ns",
        scale=1e-9,
    ),
    _Figure(
        "toka_device_late_seconds",
        "The part of toka_device_idle_seconds that an earlier plan would have avoided",
        "device_late_ns",
        scale=1e-9,
    ),
)
_STEP_SIZES: dict[str, Collection[int]] = {
    "toka_iteration_tokens": [2**power for power in range(18)],
    "vllm:iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
}
_STAGES = ("wait", "take", "plan", "send", "report", "deliver")  # of the step loop: loop_<stage>_ns


def replica_metrics(reports: Iterable[ReplicaReport]) -> Iterator[Metric]:
    """Yield all metrics of ``reports`` with the label ``replica``, and vLLM's names also with ``model_name``."""
    reports = list(reports)
    for family_of, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for figure in figures:
            values = [_value(figure, report.load) for report in reports]
            family = family_of(figure.name, figure.documentation, labels=["replica"])
            for report, value in zip(reports, values, strict=True):
                family.add_metric([report.replica], value)
            yield family
            for name in figure.vllm_names:
                family = family_of(name, figure.documentation, labels=["model_name", "replica"])
                for report, value in zip(reports, values, strict=True):
                    family.add_metric([report.model, report.replica], value)
                yield family
    yield from (_stages(reports), _forecast(reports), _waiting(reports), _cache(reports))
    yield from (_step_sizes(reports, name, shown) for name, shown in _STEP_SIZES.items())


def _value(figure: _Figure, load: observe_pb2.Load) -> float:
    read = figure.read
    return figure.scale * getattr(load.counters, read) if isinstance(read, str) else read(load)


def _waiting(reports: list[ReplicaReport]) -> Metric:
    """Return vLLM's waiting requests by reason: ``capacity`` or, while no worker is ready, ``deferred``."""
    family = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences accepted and not yet running; deferred: no worker is ready",
        labels=["model_name", "replica", "reason"],
    )
    for report in reports:
        for reason, counts in (("capacity", report.load.ready), ("deferred", not report.load.ready)):
            value = report.load.waiting_sequences if counts else 0
            family.add_metric([report.model, report.replica, reason], value)
    return family


def _cache(reports: list[ReplicaReport]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1; block_size: tokens in a KV page; num_gpu_blocks: KV pages in total",
        labels=["model_name", "replica", "block_size", "num_gpu_blocks"],
    )
    for report in reports:
        load = report.load
        family.add_metric([report.model, report.replica, str(load.page_size), str(load.total_pages)], 1)
    return family


def _step_sizes(reports: list[ReplicaReport], name: str, shown: Collection[int]) -> Metric:
    """Return the histogram of tokens in a step with the bounds ``shown``. Loads count by powers of two."""
    known = name.startswith("vllm:")
    labels = ["model_name", "replica"] if known else ["replica"]
    family = HistogramMetricFamily(name, "Tokens in a model step", labels=labels)
    for report in reports:
        upto = list(accumulate(report.load.steps_by_tokens))
        buckets = [(str(float(2**i)), float(count)) for i, count in enumerate(upto[:-1]) if 2**i in shown]
        buckets.append(("+Inf", float(upto[-1] if upto else 0)))
        values = [report.model, report.replica] if known else [report.replica]
        family.add_metric(values, buckets, report.load.counters.step_tokens)
    return family


def _stages(reports: list[ReplicaReport]) -> Metric:
    family = CounterMetricFamily(
        "toka_step_loop_seconds", "Time of the step loop's thread by stage; wait: idle", labels=["replica", "stage"]
    )
    for report in reports:
        for stage in _STAGES:
            family.add_metric([report.replica, stage], 1e-9 * getattr(report.load.counters, f"loop_{stage}_ns"))
    return family


def _forecast(reports: list[ReplicaReport]) -> Metric:
    family = GaugeMetricFamily(
        "toka_forecast_kv_pages",
        "KV pages that running sequences will use after this number of steps",
        labels=["replica", "steps"],
    )
    for report in reports:
        curve = report.load.forecast
        for steps, pages in zip(curve.steps, curve.pages, strict=True):
            family.add_metric([report.replica, str(steps)], pages)
    return family
