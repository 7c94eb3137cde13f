"""Measure live traffic on any OpenAI server: ``python -m bench.live [rates=10,40,100,160,250]``.

Streams arrive at random (Poisson) at each rate in turn, from several client processes. Prompts are random, so that none
is cached, but may share a prefix, and a Batch job may run at the same time. The time to first token (TTFT) begins with
the request, on an open connection. The time per output token (TPOT) of a stream is the time from its first text to its
last, divided by its tokens less one.

If the program starts the server, it also shows why the device idles, and where the time to the first token goes: a
quarter of the requests, at most ten a second, have a trace. Only their tokens are in the other figures. The last line
is one JSON object.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from pydantic import Field

from bench.rollout import Lengths
from bench.send import failures
from bench.server import report
from bench.target import Target, TargetConfig, first_target, rival
from bench.watch import Sample, Watch, during, summary
from bench.waterfall import STAGES, Probes, mean
from services.cli.bench.exchange import Endpoint
from services.cli.bench.figures import Figures
from services.cli.bench.load import OfferedLoad, drive, poisson
from services.cli.bench.prompts import Asking, PromptLengths, Synthetic
from services.cli.bench.sending import Bodies, Body
from services.common.config import from_command_line
from services.common.flags import Bool, Float, Int, Ints

_TRACED, _MOST_TRACED = 0.25, 10.0  # the share of requests that are traced, and the most traced requests per second
_BATCH_LINES = 20_000
_BUSY = "toka_device_busy_seconds_total"  # 0 on a CPU
_DEVICE = _BUSY, "toka_device_idle_seconds_total", "toka_device_late_seconds_total"


class LiveConfig(TargetConfig):
    """The flags."""

    rates: Ints = Field((10, 40, 100, 160, 250), min_length=1, description="requests per second, one after the other")
    seconds: Float = Field(20, gt=0, description="time of each rate, after a warm-up of two seconds")
    prompt_tokens: Lengths = Field(PromptLengths(64, 1024), description="256, 64-1024, or lognormal:MEDIAN,SIGMA,MOST")
    output_tokens: Lengths = Field(PromptLengths(128, 128), description="as prompt_tokens")
    shared_tokens: Int = Field(0, ge=0, description="tokens that all prompts begin with, beside prompt_tokens")
    batch: Bool = Field(False, description="run a Batch job during the whole load")
    vocab_size: Int = Field(32768, ge=2, description="prompts are random token ids from 1 to this number less one")
    temperature: Float = Field(0.6, ge=0)
    waterfall: Bool = Field(
        True, description="trace a quarter of the requests, at most ten a second, if this program starts the server"
    )
    plot: str | None = Field(None, description="PNG file to draw, which needs matplotlib")


@dataclass(frozen=True)
class Prefixed:
    """Bodies of another source whose prompts begin with the same random token ids."""

    body: Bodies
    prefix: Sequence[int]

    def __call__(self, number: int) -> Body:
        body = self.body(number)
        return body | {"prompt": [*self.prefix, *body["prompt"]]}


def main() -> None:
    config = from_command_line(LiveConfig)
    measured: dict[str, dict[str, Any]] = {}  # by server and rate
    against = rival(config)
    if against is not None:
        measured["rival"] = measure(config, against, None)
    with contextlib.ExitStack() as stack:
        probes = None
        if config.waterfall and config.url is None:
            from tests.fakes.collector import collecting

            collector = stack.enter_context(collecting())
            probes = Probes(collector)
            flags = f"{config.server_flags} otlp_endpoint={collector.url} trace_sample_ratio=0"
            config = config.model_copy(update={"server_flags": flags})
        target = stack.enter_context(first_target(config))
        measured["server"] = measure(config, target, probes)
    if config.plot is not None:
        plot(measured, Path(config.plot))
    own = measured.pop("server")
    report(own | measured | {"failures": sum(figures["failures"] for figures in own.values())})


def measure(config: LiveConfig, target: Target, probes: Probes | None) -> dict[str, dict[str, Any]]:
    """Return the figures by rate."""
    found = {}
    with _batch(config, target) if config.batch else contextlib.nullcontext():
        _drive(config, target, config.rates[0], 2.0, -1)  # warm up
        for number, rate in enumerate(config.rates):
            found[str(rate)] = measure_rate(config, target, rate, number, probes)
    _show(target, found)
    return found


def measure_rate(config: LiveConfig, target: Target, rate: float, number: int, probes: Probes | None) -> dict[str, Any]:
    """Measure one rate. ``number`` changes prompts and arrivals."""
    traced, traced_rate = contextlib.nullcontext(), 0.0
    if probes is not None:
        traced_rate = min(_TRACED * rate, _MOST_TRACED)
        endpoint = Endpoint(f"{target.url}/v1/completions")
        traced = probes.sending(endpoint, _bodies(config, target, 1000 + number), traced_rate)
    with Watch(target) as watch, traced:
        replies = _drive(config, target, rate - traced_rate, config.seconds, number, watch)
    failed, figures = failures(replies), Figures.of(replies, streamed=True)
    first, each, whole = figures.first_token_ms, figures.per_token_ms, figures.end_to_end_ms
    if first is None or each is None or whole is None:
        raise SystemExit(f"{target.name}: no request was answered at {rate} requests/s")
    samples = during(watch.samples, replies)
    found = {
        "requests": len(replies),
        "failures": failed,
        "first_token_ms": first.mean,
        "first_token_p99_ms": first.p99,
        "per_token_ms": each.mean,
        "per_token_p99_ms": each.p99,
        "end_to_end_ms": whole.mean,
        "end_to_end_p99_ms": whole.p99,
        "tokens_per_second": figures.rate(figures.output_tokens + (0 if probes is None else probes.output_tokens)),
        "whole": summary(samples),
    }
    if probes is not None:
        waterfalls = probes.waterfalls()
        found |= {"traced": len(waterfalls), "waterfall_ms": mean(waterfalls)}
    return found | {"idle": idle_shares(samples)}


def idle_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the shares of time in which the device idled, by what it waited for. Empty if the server has no figures.

    ``host``: the worker had a plan and did not launch it yet. ``plan``: the worker had no plan, although sequences ran
    or waited. ``requests``: there were no sequences.
    """
    shares = {"host": 0.0, "plan": 0.0, "requests": 0.0}
    seconds = 0.0
    # The server updates its figures about once a second, so the time between two updates counts.
    updates = [
        after for before, after in itertools.pairwise(samples) if after.metrics.get(_BUSY) != before.metrics.get(_BUSY)
    ]
    for before, after in itertools.pairwise(updates):
        took = after.at - before.at
        busy, idle, late = (after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0) for name in _DEVICE)
        seconds += took
        waiting = before.metrics.get("toka_num_requests_waiting", 0.0)
        unused = not (before.running or after.running or waiting)
        shares["host"] += idle - late
        shares["plan"] += late
        # Less than 0 if the server updated its figures more often in this time than in others.
        shares["requests" if unused else "plan"] += took - busy - idle
    return {name: max(0.0, share / seconds) for name, share in shares.items()} if seconds else {}


def _drive(
    config: LiveConfig, target: Target, rate: float, seconds: float, number: int, watch: Watch | None = None
) -> list[Any]:
    rng = np.random.default_rng((7, number + 1))
    arrivals = poisson(rate, rng, None, seconds) or [0.0]
    load = OfferedLoad(_bodies(config, target, number + 1), len(arrivals), arrivals=arrivals)
    outcome = drive(
        Endpoint(f"{target.url}/v1/completions"),
        load,
        config.clients,
        lambda *_: None if watch is None else watch.look_in_time(),
    )
    if outcome.interrupted:
        raise SystemExit("interrupted")
    return [reply for _, reply in outcome.replies]


def _bodies(config: LiveConfig, target: Target, seed: int) -> Bodies:
    asking = Asking(target.model, fields={"ignore_eos": True, "temperature": config.temperature})
    bodies = Synthetic(asking, seed, config.prompt_tokens, config.output_tokens, config.vocab_size)
    prefix = np.random.default_rng(3).integers(1, config.vocab_size, config.shared_tokens)
    return Prefixed(bodies, prefix.tolist())


@contextlib.contextmanager
def _batch(config: LiveConfig, target: Target) -> Iterator[None]:
    """Run a Batch job while the context is open."""
    asking = Asking(target.model, stream=False, fields={"ignore_eos": True})
    body = Synthetic(asking, 99, config.prompt_tokens, PromptLengths(512, 1024), config.vocab_size)
    lines = (
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body(number)})
        for number in range(_BATCH_LINES)
    )
    with httpx.Client(base_url=f"{target.url}/v1", trust_env=False, timeout=600) as client:
        sent = client.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", "\n".join(lines))})
        job = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": sent.json()["id"]}
        made = client.post("/batches", json=job).raise_for_status().json()["id"]
        yield
        if client.get(f"/batches/{made}").json()["status"] != "in_progress":
            raise SystemExit("the Batch job ended before the last request")
        client.post(f"/batches/{made}/cancel").raise_for_status()


def _show(target: Target, found: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{target.name}: milliseconds, mean (99th percentile)")
    for column in ("requests/s", "TTFT", "TPOT", "end to end", "tokens/s", "idle: host, plan, requests", "failed"):
        table.add_column(column, justify="right")
    for rate, figures in found.items():
        times = (
            f"{figures[f'{name}_ms']:.2f} ({figures[f'{name}_p99_ms']:.2f})"
            for name in ("first_token", "per_token", "end_to_end")
        )
        idle = ", ".join(f"{100 * share:.1f} %" for share in figures["idle"].values())
        table.add_row(rate, *times, f"{figures['tokens_per_second']:.0f}", idle, str(figures["failures"]))
    Console().print(table)
    if any(figures.get("waterfall_ms") for figures in found.values()):
        stages = Table(title="milliseconds to the first token, by stage (means of traced requests)")
        for column in ("requests/s", *STAGES, "sum"):
            stages.add_column(column, justify="right")
        for rate, figures in found.items():
            parts = figures.get("waterfall_ms") or {}
            stages.add_row(rate, *(f"{part:.2f}" for part in parts.values()), f"{sum(parts.values()):.2f}")
        Console().print(stages)


def plot(measured: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw TTFT, TPOT and the stages to the first token over the rate, as a PNG. ``measured`` is by server and rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, rates in measured.items():
        x = [float(rate) for rate in rates]
        for shown, key, title in zip(axes, ("first_token", "per_token"), ("TTFT", "TPOT"), strict=False):
            shown.plot(x, [each[f"{key}_ms"] for each in rates.values()], marker="o", label=f"{name}, mean")
            shown.plot(x, [each[f"{key}_p99_ms"] for each in rates.values()], marker=".", ls="--", label=f"{name}, p99")
            shown.set(xlabel="requests/s", ylabel=f"{title} in ms", ylim=(0, None))
    stages = [each.get("waterfall_ms") or {} for each in measured["server"].values()]
    if all(stages):
        bottom = np.zeros(len(stages))
        for name in STAGES:
            parts = np.array([each[name] for each in stages])
            axes[2].bar([*measured["server"]], parts, bottom=bottom, label=name)
            bottom += parts
        axes[2].set(xlabel="requests/s", ylabel="ms to the first token")
    for shown in axes:
        shown.grid(alpha=0.3)
        if shown.has_data():
            shown.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
