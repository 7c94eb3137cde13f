"""Samples of a server under load, every quarter second.

They have its ``/metrics``, the energy of the GPUs if it runs on this host, and the CPU time of its processes if this
program started it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from bench.processes import Usage
from bench.target import Target
from services.cli.bench.exchange import Reply

PERIOD_S = 0.25
FULL = 0.97  # share of the largest number of running sequences from which on the state is steady
_GENERATED = ("toka_generation_tokens_total", "vllm:generation_tokens_total")
_RUNNING = ("toka_num_requests_running", "vllm:num_requests_running")


@dataclass(frozen=True)
class Sample:
    """A sample: ``metrics`` summed over labels, and CPU seconds so far by process."""

    at: float  # time.perf_counter
    metrics: dict[str, float]
    cpu_s: dict[str, float]
    joules: float | None = None  # energy of the visible GPUs so far; None = not measured

    @property
    def generated(self) -> float | None:
        """Tokens delivered so far, or None if the server does not report them."""
        return _first(self.metrics, _GENERATED)

    @property
    def running(self) -> float | None:
        """Running sequences."""
        return _first(self.metrics, _RUNNING)


class Watch:
    """A collector of samples. Used by the thread that waits for the clients."""

    def __init__(self, target: Target) -> None:
        self.samples: list[Sample] = []
        self._client = httpx.Client(base_url=target.url, trust_env=False, timeout=5)
        self._usage = None if target.pid is None else Usage(target.pid)
        self._gpus = target.gpus()
        self._next = 0.0

    def __enter__(self) -> "Watch":
        self.look()
        return self

    def __exit__(self, *error: object) -> None:
        self.look()
        self._client.close()

    def look_in_time(self) -> None:
        """Take a sample if a period has passed since the last one."""
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + PERIOD_S
            self.look()

    def look(self) -> None:
        """Take a sample. There is none if the server has no metrics or does not answer in time."""
        try:
            answer = self._client.get("/metrics")
        except httpx.TransportError:
            return
        if answer.status_code == httpx.codes.OK:
            cpu = {} if self._usage is None else self._usage.seconds()
            joules = None if self._gpus is None else self._gpus.joules()
            self.samples.append(Sample(time.perf_counter(), read_metrics(answer.text), cpu, joules))


def read_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus' text format. Return the sum of each metric over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.split("{", 1)[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def during(samples: Sequence[Sample], replies: Sequence[Reply]) -> list[Sample]:
    """Return the samples from the last one before the first request to the first one after the last answer."""
    begin = min(reply.sent_at for reply in replies)
    end = max(reply.ended_at for reply in replies)
    before = [sample for sample in samples if sample.at <= begin][-1:]
    behind = [sample for sample in samples if sample.at >= end][:1]
    return before + [sample for sample in samples if begin < sample.at < end] + behind


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples between the first and the last in steady state. Empty if no sequence ran."""
    peak = max((sample.running or 0.0 for sample in samples), default=0.0)
    full = [index for index, sample in enumerate(samples) if peak and (sample.running or 0.0) >= FULL * peak]
    return list(samples[full[0] : full[-1] + 1]) if len(full) > 1 else []


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the changes from the first sample to the last, without figures that the server does not report."""
    if len(samples) < 2:
        return {}
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    found = {"seconds": seconds, "peak_running": max(sample.running or 0.0 for sample in samples)}

    def grew(name: str) -> float:
        return last.metrics.get(name, 0.0) - first.metrics.get(name, 0.0)

    if first.generated is not None and last.generated is not None:
        tokens = last.generated - first.generated
        found["tokens_per_second"] = tokens / seconds
        if first.joules is not None and last.joules is not None and tokens:
            found["joules_per_token"] = (last.joules - first.joules) / tokens
    if steps := grew("toka_steps_total"):
        found |= {"steps": steps, "ms_per_step": 1000 * seconds / steps}
    for name, part, whole in (
        ("wasted_share", ("toka_wasted_tokens_total",), ("toka_wasted_tokens_total", "toka_generation_tokens_total")),
        ("hydragen_share", ("toka_hydragen_rows_total",), ("toka_batch_rows_total",)),
        (
            "device_idle_share",
            ("toka_device_idle_seconds_total",),
            ("toka_device_busy_seconds_total", "toka_device_idle_seconds_total"),
        ),
    ):
        total = sum(map(grew, whole))
        if total > 0:
            found[name] = sum(map(grew, part)) / total
    for name, spent in last.cpu_s.items():
        found[f"cores_{name}"] = (spent - first.cpu_s.get(name, 0.0)) / seconds
    return found


def plot(samples: Sequence[Sample], target: Path) -> None:
    """Draw running sequences and tokens per second over time as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [sample for sample in samples if sample.generated is not None]
    begin = shown[0].at if shown else 0.0
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    upper.plot([sample.at - begin for sample in shown], [sample.running for sample in shown])
    upper.set(ylabel="sequences running", ylim=(0, None))
    pairs = [(a, b) for a, b in pairwise(shown) if b.at > a.at]
    middles = [(a.at + b.at) / 2 - begin for a, b in pairs]
    lower.plot(middles, [(b.generated - a.generated) / (b.at - a.at) for a, b in pairs])
    lower.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _first(metrics: dict[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)
