"""Find memory leaks: ``make soak seconds=3600``, or ``python -m bench.soak [worker=cpu]``.

Runs a deployment of processes under a mixed load: requests with known answers and new requests, with and without
streaming, schemas, clients that disconnect, requests that are refused, files and Batch jobs. The resident and the
unshared memory of every process after ``settle`` seconds is compared with that at the end. The last line is one JSON
object. The exit status is 1 if the memory of a process grew by more than the factor ``growth``, if a process exited, or
if a request failed.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.chaos.clients import learn_answers
from bench.chaos.cluster import Cluster, cluster
from bench.chaos.metrics import left_running
from bench.chaos.questions import make_questions
from bench.server import run_kept
from bench.soak.batches import Batches
from bench.soak.config import SoakConfig
from bench.soak.load import Load
from services.common.config import from_command_line

_EVERY_S = 1.0
_SHOWN = 5  # largest number of printed failures
_MB = 10**6

Levels = dict[str, dict[str, float]]  # process -> rss and uss, MB


def main() -> None:
    config = from_command_line(SoakConfig)
    run_kept(
        "soak",
        config.directory,
        lambda directory: asyncio.run(measure(config, directory)),
        draw,
        lambda figures: is_right(figures, config.growth),
    )


async def measure(config: SoakConfig, directory: Path) -> dict[str, Any]:
    with cluster(config, directory) as (running, _):
        keeping = asyncio.create_task(running.keep())
        try:
            await running.wait_ready()
            figures = await _soak(config, running)
        finally:
            keeping.cancel()
    return figures | {"crashes": dict(running.crashes)}


async def _soak(config: SoakConfig, running: Cluster) -> dict[str, Any]:
    urls = list(running.urls.values())
    questions = await learn_answers(running.urls, make_questions(config.questions, config.seed))
    load, batches = (
        Load(urls, questions, config.rate, config.seed),
        Batches(urls[0], config.batch_lines, config.batch_pause),
    )
    began = time.monotonic()

    def over() -> bool:
        return time.monotonic() >= began + config.seconds

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(config.concurrency, over))
        tasks.create_task(batches.run(over))
        await asyncio.sleep(config.settle)
        first = await _levels(running, config.window)
        counted = load.done.total()
        await asyncio.sleep(began + config.seconds - config.window - time.monotonic())
        last = await _levels(running, config.window)
    failures = [*load.failures, *batches.failures]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "worker": config.worker,
        "requests": load.done.total() + batches.lines_done,
        "requests_at_first": counted,
        "requests_by_kind": dict(sorted(load.done.items())) | {"batch_line": batches.lines_done},
        "batches": batches.done,
        "failures": len(failures),
        "failures_shown": failures[:_SHOWN],
        "memory_mb": {name: {"first": first[name], "last": last[name]} for name in first},
        "growth": {name: _growth(first[name], last[name]) for name in first},
        "left_running": await left_running(running),
    }


async def _levels(running: Cluster, seconds: float) -> Levels:
    """Return the medians of memory over ``seconds``."""
    samples: dict[str, list[Any]] = {name: [] for name in running.processes}
    until = time.monotonic() + seconds
    while True:
        for name, process in running.processes.items():
            samples[name].append(psutil.Process(process.pid).memory_full_info())
        if time.monotonic() >= until:
            break
        await asyncio.sleep(_EVERY_S)

    def median(found: list[Any], kind: Callable[[Any], int]) -> float:
        return round(statistics.median(map(kind, found)) / _MB, 1)

    return {
        name: {"rss": median(found, lambda memory: memory.rss), "uss": median(found, lambda memory: memory.uss)}
        for name, found in samples.items()
    }


def _growth(first: dict[str, float], last: dict[str, float]) -> float:
    return round(max(last[kind] / first[kind] for kind in first), 3)


def is_right(figures: dict[str, Any], growth: float) -> bool:
    grown = max(figures["growth"].values()) > growth
    return not (grown or figures["failures"] or figures["crashes"] or figures["left_running"])


def draw(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['requests']} requests in {figures['seconds']:.0f} s")
    for column in ("process", "first MB", "last MB", "growth"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, levels in figures["memory_mb"].items():
        table.add_row(name, str(levels["first"]["rss"]), str(levels["last"]["rss"]), f"{figures['growth'][name]:.3f}")
    Console().print(table)
    for failure in figures["failures_shown"]:
        print(failure)


if __name__ == "__main__":
    main()
