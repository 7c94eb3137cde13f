"""Verify answers under faults: ``make chaos seconds=600 streams=200``, or ``python -m bench.chaos``.

Runs two gateways, two schedulers and two workers as processes, which are restarted when they exit. Clients send
requests whose answers are known: greedy requests and requests with seeds, which the same deployment answered before the
faults. Meanwhile services are killed, terminated, stopped and disconnected from each other. ``seed`` determines the
times and the order. A client that loses its gateway retries at another one. Every other difference counts as a request
that is lost, duplicated, wrong or hanging. Recovery is the time from a fault until every stream that was open at that
time has progressed.

The report of each failed request is kept with the logs. The last line is one JSON object. The exit status is 1 if a
request was lost, duplicated, wrong or hanging, if a service crashed, did not terminate or broke the contract, if a
sequence still runs at the end, or if fewer faults occurred than were requested.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos.clients import Clients, learn_answers
from bench.chaos.cluster import Cluster, cluster
from bench.chaos.config import ChaosConfig
from bench.chaos.metrics import Failovers, left_running
from bench.chaos.network import Link
from bench.chaos.questions import make_questions
from bench.chaos.recovery import Recoveries
from bench.chaos.schedule import plan_faults
from bench.chaos.storm import Storm
from bench.chaos.tally import Tally
from bench.chaos.weather import Weather
from bench.memory import PeakMemory
from bench.server import run_kept
from services.common.config import from_command_line

_SECONDS_PER_FAULT = 6.0


def main() -> None:
    config = from_command_line(ChaosConfig)
    run_kept("chaos", config.directory, lambda directory: asyncio.run(measure(config, directory)), draw, is_right)


async def measure(config: ChaosConfig, directory: Path) -> dict[str, Any]:
    """Run a deployment under all scheduled faults."""
    with cluster(config, directory) as (running, links), contextlib.ExitStack() as watched:
        keeping = asyncio.create_task(running.keep())
        try:
            await running.wait_ready()
            memory = {
                role: watched.enter_context(PeakMemory(lambda role=role: running.pids(role))) for role in running.names
            }
            figures = await _rage(config, running, links, directory)
        finally:
            keeping.cancel()
    figures["memory_mb"] = {role: peak.megabytes for role, peak in memory.items()}
    return figures | {"crashes": dict(running.crashes), "violations": running.violations()}


async def _rage(config: ChaosConfig, running: Cluster, links: list[Link], directory: Path) -> dict[str, Any]:
    questions = await learn_answers(running.urls, make_questions(config.questions, config.seed))
    weather, recoveries, tally = Weather(), Recoveries(), Tally(directory)
    clients = Clients(
        config.streams, running.urls, questions, weather=weather, recoveries=recoveries, tally=tally,
        hang_s=config.hang_seconds, seed=config.seed,
    )  # fmt: skip
    count = round(config.seconds / _SECONDS_PER_FAULT) if config.faults is None else config.faults
    kinds = [kind for kind in config.kinds if running.network.partitions == "on" or not kind.startswith("partition")]
    faults = plan_faults(count, config.seconds, kinds, running.names, links, config.longest_fault, config.seed)
    storm = Storm(running, weather, recoveries)
    over_at = weather.began + config.seconds
    failovers = Failovers(running)
    raging, counting = asyncio.create_task(storm.rage(faults)), asyncio.create_task(failovers.watch())
    await clients.run(lambda: time.monotonic() >= over_at and raging.done())
    await raging
    counting.cancel()
    await failovers.look()
    seconds = time.monotonic() - weather.began
    timeline = "".join(f"{weather.told(trouble)}\n" for trouble in weather.troubles)
    (directory / "timeline.txt").write_text(timeline)
    await running.wait_ready()
    return {
        "seconds": round(seconds, 1),
        "streams": config.streams,
        "worker": config.worker,
        "seed": config.seed,
        **tally.figures(),
        "failovers": failovers.total,
        "faults": storm.struck.total(),
        "faults_asked": count,
        "faults_by_kind": dict(sorted(storm.struck.items())),
        "recovery": recoveries.figures(),
        "partitions": running.network.partitions,
        "late": storm.late,
        "left_running": await left_running(running),
    }


def is_right(figures: dict[str, Any]) -> bool:
    bad = ("lost", "duplicated", "wrong", "hangs", "left_running", "crashes", "late", "violations")
    return not any(figures[name] for name in bad) and figures["faults"] == figures["faults_asked"]


def draw(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['faults']} faults in {figures['seconds']:.0f} s, {figures['streams']} clients")
    for column in ("fault", "times", "median s", "worst s"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind, times in figures["recovery"].items():
        table.add_row(kind, *(str(times[name]) for name in ("count", "median_s", "worst_s")))
    Console().print(table)
    rate = figures["tokens"] / figures["seconds"]
    counts = (f"{name} {figures[name]}" for name in ("retries", "failovers", "lost", "duplicated", "wrong", "hangs"))
    print(f"{figures['requests']} requests, {figures['tokens']} tokens ({rate:.0f} a second), {', '.join(counts)}")


if __name__ == "__main__":
    main()
