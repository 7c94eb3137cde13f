"""Measure the seconds from the command ``toka`` until it serves, by phase.

``python -m bench.start [starts=5] [cold=F] [load_seconds=0] [flag of toka=value ...]``

Each start runs ``toka`` with JSON logs and reads its events. With ``cold=T``, each has an empty ``compile_cache_dir``.
With ``load_seconds=20``, every worker takes 20 s longer to load its model. The row ``connection`` then shows how soon
the other processes notice that it is ready.

The rows are in the order of time: ``processes`` (until the first log line of the worker), the phases that the slowest
worker reports, ``other`` (of the worker), and ``connection`` (from the worker's "model ready" until ``toka`` prints
that it serves). Indented rows are parts of ``connection``. Figures are medians.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pydantic import Field

from bench.server import report
from bench.slow_worker import LOAD_SECONDS
from services.common.config import DeploymentConfig, from_command_line
from services.common.flags import Bool, Float, Int, without_flags

_TOKA = "from services.launcher.toka import main; main()"
_SLOW_WORKERS = """
from services.launcher.deployment import ChildSpec
ChildSpec.module = property(lambda spec: "bench.slow_worker" if spec.role == "worker" else f"services.{spec.role}")
"""
_OWN = ("starts", "cold", "load_seconds")


class StartConfig(DeploymentConfig):
    """The flags: the number of starts, and the deployment."""

    starts: Int = Field(5, ge=1, description="starts to measure")
    cold: Bool = Field(False, description="each start has an empty compile_cache_dir")
    load_seconds: Float = Field(0.0, ge=0, description="seconds that each worker loads longer")


class StartError(Exception):
    """``toka`` did not serve; the message is the end of its log."""


def main() -> None:
    """Measure, print a table and report the figures."""
    config = from_command_line(StartConfig)
    given = without_flags(StartConfig, sys.argv[1:], _OWN)
    measured = []
    for number in range(config.starts):
        measured.append(start(config, given))
        print(f"start {number + 1} of {config.starts}: {measured[-1]['total']:.2f} s", flush=True)
    rows = list(dict.fromkeys(row for each in measured for row in each))
    figures = {row: statistics.median(each.get(row, 0.0) for each in measured) for row in rows}
    for row, seconds in figures.items():
        print(f"{row:<28} {seconds:7.2f} s")
    report({"starts": config.starts, "cold": config.cold, "load_seconds": config.load_seconds} | figures)


def start(config: StartConfig, flags: list[str]) -> dict[str, float]:
    """Start ``toka`` once and stop it. Returns seconds by phase. Raises ``StartError``."""
    with contextlib.ExitStack() as undo:
        if config.cold:
            empty = undo.enter_context(tempfile.TemporaryDirectory())
            flags = [
                *(flag for flag in flags if not flag.startswith("compile_cache_dir=")),
                f"compile_cache_dir={empty}",
            ]
        log = undo.enter_context(tempfile.TemporaryFile("w+"))
        program = f"{_SLOW_WORKERS if config.load_seconds else ''}{_TOKA}"
        ports = [] if any(flag.startswith("port=") for flag in flags) else ["port=0", "grpc_port=0"]
        command = [sys.executable, "-c", program, *flags, *ports, "log_format=json"]
        environment = os.environ | {LOAD_SECONDS: str(config.load_seconds)}
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert process.stdout is not None
        try:
            served = next((time.time() for line in process.stdout if "Tokasaurus serves" in line), None)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        log.seek(0)
        lines = log.readlines()
        if served is None:
            raise StartError("".join(lines[-20:]))
        return breakdown(began, served, list(_events(lines)))


def _events(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            event["at"] = datetime.fromisoformat(event["timestamp"]).timestamp()
            yield event


def breakdown(began: float, served: float, events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase of a start.

    ``began`` and ``served``: times of the command and of its message that it serves, by ``time.time()``.
    """

    def times(service: str, event: str) -> list[float]:
        found = [each["at"] for each in events if each["service"] == service and each["event"] == event]
        return [at for at in found if at <= served] or [began]

    first = min((each["at"] for each in events if each["service"] == "worker"), default=began)
    ready = max(times("worker", "model ready"))
    phases = [each["phases"] for each in events if each["service"] == "worker" and each["event"] == "started"]
    slowest: dict[str, float] = max(phases, key=lambda each: sum(each.values()), default={})
    connected = max(times("scheduler", "worker connected"))
    scheduler_ready = max(times("scheduler", "ready"))
    gateway_ready = max(times("gateway", "scheduler ready"))
    rows = {"processes": first - began} | slowest
    rows["other"] = ready - first - sum(slowest.values())
    rows["connection"] = served - ready
    rows["  to the scheduler"] = connected - ready
    rows["  scheduler ready"] = scheduler_ready - connected
    if gateway_ready > began:
        rows["  gateway ready"] = gateway_ready - scheduler_ready
        rows["  printed"] = served - gateway_ready
    return rows | {"total": served - began}


if __name__ == "__main__":
    main()
