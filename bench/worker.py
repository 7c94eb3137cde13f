"""Measure a worker's steps without gRPC and scheduler: ``python -m bench.worker [record=FILE|DIR]
[worker_flags='...'] [steps=200] [skip=20] [window=50] [profiles=3] [rows=.. groups=.. prefix=.. own=..] [plot=FILE]``.

The plans are those of a recording (made by ``record_plans=DIR`` of a scheduler; the largest file of a directory), or
synthetic decode steps of ``rows`` sequences: with ``rows=1,64``, those of one sequence and then those of 64, of a
worker with the sizes for 64; ``plot`` shows those of 64. The worker has the flags ``worker_flags``. As in a server,
several steps are in flight. For every window of steps, the program prints milliseconds of a step by the clock and on
the device, the idle share of the device, and the host's preparation. On CUDA, some steps are also profiled by kernel:
the time by part of the model, and the least time that arithmetic and bytes allow at rates measured in this process.
The last line is one JSON object.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from bench.gpus import Gpus
from bench.local_worker import MOST_IN_FLIGHT, Feeder, LocalWorker, boot_worker, prepare, read_worker_flags, refuse
from bench.plan_stream import PAGE_SIZE, MadeUp, RecordedStream
from bench.server import report
from bench.step_sizes import SizeTracker, StepSizes
from bench.windows import HEADINGS, Windows
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.model import files as model_files
from services.common.model.json_object import read_json
from services.common.plan.types import Plan

if TYPE_CHECKING:
    from bench.roofline import Rates

_LARGEST_KERNELS = 8


class BenchConfig(Config):
    """The flags."""

    record: str | None = Field(None, description="recording, or directory of recordings; default: synthetic steps")
    worker_flags: str = Field(
        "", description="flags quoted as in a shell: 'model=DIR load_format=dummy torch_compile=T'"
    )
    steps: Int = Field(200, ge=1, description="largest number of measured steps")
    skip: Int = Field(20, ge=0, description="steps before the measurement")
    window: Int = Field(50, ge=1, description="steps in a line of the table")
    in_flight: Int = Field(3, ge=1, le=MOST_IN_FLIGHT)
    profiles: Int = Field(3, ge=0, description="steps to profile by kernel, on cuda")
    rows: str = Field("64", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="numbers of synthetic sequences")
    groups: Int = Field(0, ge=0, description="number of Hydragen groups; 0 = no shared prefixes")
    prefix: Int = Field(704, ge=0, description="tokens that a group shares")
    own: Int = Field(110, ge=2, description="mean tokens of a sequence behind the prefix")
    temperature: Float = Field(0.6, ge=0)
    plot: str | None = Field(None, description="PNG of the parts and the roofline, on cuda")


def main() -> None:
    """Measure, print the tables, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    total = config.skip + config.steps
    made_up: list[MadeUp] = []
    recorded = None
    if config.record is None:
        made_up = [_made_up(config, int(rows)) for rows in config.rows.split(",")]
        largest = max(each.rows for each in made_up)
        defaults = {
            "max_seqs_per_forward": largest,
            "max_tokens_per_forward": max(2048, largest),
            "kv_cache_num_tokens": PAGE_SIZE * max(each.pages(total, PAGE_SIZE) for each in made_up),
        }
    else:
        recorded = RecordedStream(config.record, total)
        if len(recorded) <= config.skip:
            refuse(f"record={recorded.path}: it has {len(recorded)} plans, none behind skip={config.skip}")
        total = len(recorded)
        defaults = recorded.defaults()
    flags = read_worker_flags(config.worker_flags, **defaults)
    prepare(flags)
    rates = _rates(flags.device)
    worker = boot_worker(flags)
    rates = rates if worker.on_cuda else None
    if recorded is not None:
        recorded.check(worker.runner.limits)
        runs = [run(worker, recorded.plans(), config, total, rates)]
        source = str(recorded.path)
    else:
        for each in made_up:
            _check(each, total, worker)
        runs, source = [_run_made_up(each, worker, config, total, rates) for each in made_up], "made up"
    figures, profiles = runs[-1]
    found = {"source": source, "model": worker.booted.model, "device": worker.booted.device, **figures}
    if len(runs) > 1:
        found["by_rows"] = {
            each.rows: of_rows | {"profiles": of_steps} for each, (of_rows, of_steps) in zip(made_up, runs, strict=True)
        }
    if rates is not None:
        found["rates"] = {name: value and round(value / 1e12, 1) for name, value in asdict(rates).items()}
        found["profiles"] = profiles
    if config.plot is not None and profiles:
        plot(profiles, Path(config.plot))
    report(found)


def _made_up(config: BenchConfig, rows: int) -> MadeUp:
    if config.groups > rows:
        refuse(f"groups={config.groups}: more than rows={rows}")
    return MadeUp(rows, config.groups, config.prefix, config.own, config.temperature)


def _run_made_up(
    made_up: MadeUp, worker: LocalWorker, config: BenchConfig, total: int, rates: "Rates | None"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    print(f"{made_up.rows} sequences")
    worker.runner.reset()
    return run(worker, ((plan, 0) for plan in made_up.plans(total, worker.runner.limits)), config, total, rates)


def run(
    worker: LocalWorker, plans: Iterator[tuple[Plan, int]], config: BenchConfig, total: int, rates: "Rates | None"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures of all windows, and those of the profiled steps, which are in no window."""
    feeder, tracker = Feeder(worker.runner, config.in_flight), SizeTracker(worker.runner.limits)
    # The profiled steps are in the middle of equal parts of the stream.
    count = 0 if rates is None else config.profiles
    chosen = {int(step) for step in np.linspace(config.skip, total, 2 * count + 1)[1::2]}
    windows, profiles = Windows(config.window, Gpus.visible() if worker.on_cuda else None), []
    print(HEADINGS)
    for index, (plan, took_ns) in enumerate(plans):
        sizes = tracker.apply(plan)
        if index == config.skip or index in chosen:
            feeder.drain()
            windows.cut()
        if index in chosen:
            profiles.append(_profiled(worker, feeder, plan, sizes, rates))
            windows.forget()
        elif index < config.skip:
            feeder.put(plan, took_ns, lambda output: None)
        else:
            feeder.put(plan, took_ns, partial(windows.add, sizes))
    feeder.drain()
    windows.cut()
    feeder.close()
    for profile in profiles:
        _print_profile(profile)
    return windows.total(), profiles


def _profiled(worker: LocalWorker, feeder: Feeder, plan: Plan, sizes: StepSizes, rates: "Rates") -> dict[str, Any]:
    from bench.kernel_table import profile
    from bench.roofline import PARTS, least_ms
    from services.worker.described.registry import read_model_config

    def step() -> None:
        feeder.put(plan, 0, lambda output: None)
        feeder.drain()

    table = profile(step, grouped=sizes.prefix_pairs > 0)
    directory = model_files.read_card(worker.config.model).directory
    model = read_model_config(read_json(directory / "config.json"))
    fp8, fp8_cache = worker.config.quantization == "fp8", worker.config.kv_cache_dtype == "fp8"
    least = least_ms(sizes, model, rates, fp8=fp8, fp8_cache=fp8_cache)
    parts = {
        name: {"ms": table.parts.get(name, 0.0), "least_ms": least[name], "launches": table.counts[name]}
        for name in PARTS
    }
    return {"step": plan.step, **asdict(sizes), "parts": parts, "kernels": dict(table.largest(_LARGEST_KERNELS))}


def _print_profile(profile: dict[str, Any]) -> None:
    print(f"\nstep {profile['step']}: {profile['rows']} rows, {profile['tokens']} tokens, {profile['samples']} sampled")
    whole = {"ms": 0.0, "least_ms": 0.0, "launches": 0}
    for name, part in profile["parts"].items():
        for key in whole:
            whole[key] += part[key]
        _print_part(name, part)
    _print_part("all", whole)
    for name, ms in profile["kernels"].items():
        print(f"    {ms:8.3f} ms  {name}")


def _print_part(name: str, part: dict[str, float]) -> None:
    share = f"{part['least_ms'] / part['ms']:6.0%}" if part["ms"] else "      "
    print(
        f"  {name:<18} {part['ms']:9.3f} ms   roofline {part['least_ms']:9.3f} {share}   {part['launches']:5} launches"
    )


def _rates(device: str) -> "Rates | None":
    """Measure the rates of the device, before the worker takes its memory. Return None on a CPU."""
    if device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    from bench.roofline import measure_rates

    return measure_rates()


def _check(made_up: MadeUp, steps: int, worker: LocalWorker) -> None:
    limits = worker.runner.limits
    needed = {
        "max_slots": made_up.rows,
        "max_tokens_per_step": made_up.rows,
        "page_count": made_up.pages(steps, limits.page_size),
        "max_context_tokens": made_up.prefix * bool(made_up.groups) + 2 * made_up.own + steps,
    }
    for name, least in needed.items():
        if getattr(limits, name) < least:
            refuse(f"these steps need {name}={least}, but the worker has {getattr(limits, name)}: change worker_flags")
    if made_up.groups and not limits.hydragen:
        refuse(f"groups={made_up.groups}: this worker has no Hydragen; use groups=0")


def plot(profiles: list[dict[str, Any]], target: Path) -> None:
    """Draw the parts of each profiled step as stacked bars, measured and by the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2.5 + 1.6 * len(profiles), 5), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors
    places = np.arange(len(profiles))
    for key, shift in (("ms", -0.2), ("least_ms", 0.2)):
        below = np.zeros(len(profiles))
        for index, name in enumerate(profiles[0]["parts"]):
            heights = np.array([profile["parts"][name][key] for profile in profiles])
            axes.bar(places + shift, heights, 0.36, bottom=below, color=colours[index], label=name)
            below += heights
    axes.set(ylabel="ms (left: measured, right: roofline)")
    axes.set_xticks(places, [f"step {profile['step']}\n{profile['tokens']} tokens" for profile in profiles])
    handles, labels = axes.get_legend_handles_labels()
    half = len(profiles[0]["parts"])
    axes.legend(handles[:half], labels[:half], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
