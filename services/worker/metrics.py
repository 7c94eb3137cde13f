"""Metrics of a worker: steps, compilations and the device."""

from collections.abc import Iterator

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.common.config import WorkerConfig
from services.worker.boot.compilation import kernel_compilations, recompilations
from services.worker.engine.engine import Engine
from services.worker.engine.power import Power
from services.worker.models.expert_load import ExpertLoad, imbalance


class WorkerMetrics:
    """A Prometheus collector. It yields nothing before ``begin``."""

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self._engine, self._config = engine, config
        self._labels: dict[str, str] = {}
        self._power: Power | None = None
        self._load: ExpertLoad | None = None

    def begin(self, device: str, load: ExpertLoad | None = None) -> None:
        """Start to yield metrics, when the model is loaded on ``device``. ``load`` is that of its experts."""
        self._load = load
        config = self._config
        self._power = Power.of(torch.device(device))
        ranks = {"dp_rank": config.dp_rank, "tp_rank": config.tp_rank, "pp_rank": config.pp_rank}
        self._labels = {"device": device, **{name: str(rank) for name, rank in ranks.items()}}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. The registry calls it for each scrape, in a thread of the metrics server."""
        if not self._labels:
            return
        totals = self._engine.totals
        yield self._counter("steps", "Steps answered", {(): totals.steps})
        parts = {
            ("queued",): totals.queued,
            ("prepare",): totals.prepare,
            ("forward",): totals.forward,
            ("sample",): totals.sample,
        }
        yield self._counter(
            "step_seconds",
            "Time of steps; queued: from a plan's arrival to its start. Parts of different steps overlap",
            {part: ns * 1e-9 for part, ns in parts.items()},
            "part",
        )
        yield self._counter("device_busy_seconds", "The device worked on steps; 0 on CPUs", {(): totals.device * 1e-9})
        yield self._counter("device_idle_seconds", "It had nothing to do between two", {(): totals.idle * 1e-9})
        yield self._gauge("plans_queued", "Plans received and not yet started", self._engine.queued_plans)
        compiled: dict[tuple[str, ...], float] = {("graph",): recompilations(), ("kernel",): kernel_compilations()}
        yield self._counter("recompilations", "Compilations since the worker was ready", compiled, "kind")
        if self._load is not None:
            yield from self._experts(self._load)
        if self._power is not None:
            if (joules := self._power.joules()) is not None:
                yield self._counter("energy_joules", "Energy that the device has used", {(): joules})
            if (watts := self._power.watts()) is not None:
                yield self._gauge("power_watts", "Power that the device draws", watts)

    def _experts(self, load: ExpertLoad) -> Iterator[Metric]:
        counts = load.read()
        tokens: dict[tuple[str, ...], float] = {
            (str(expert),): float(count) for expert, count in enumerate(counts.sum(axis=0))
        }
        yield self._counter("expert_tokens", "Tokens of each expert, summed over layers", tokens, "expert")
        documentation = "Tokens of the busiest expert over the mean of a layer's experts; a mean over layers"
        yield self._gauge("expert_load_imbalance", documentation, imbalance(counts))

    def _counter(self, name: str, documentation: str, values: dict[tuple[str, ...], float], *label: str) -> Metric:
        family = CounterMetricFamily(f"toka_worker_{name}", documentation, labels=[*self._labels, *label])
        for more, value in values.items():
            family.add_metric([*self._labels.values(), *more], value)
        return family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"toka_worker_{name}", documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
