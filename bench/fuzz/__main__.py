"""Requests that no client should send: ``make fuzz requests=1000000``, or ``python -m bench.fuzz surface=http``.

A gateway, a scheduler and a fake worker, each a process that is started once. Over HTTP and over gRPC come requests
that are right, and such that are right but for something: of a wrong type, size or encoding, cut off, or no request at
all. Every answer must be one that a server may give: no 5xx, no UNKNOWN, no INTERNAL, errors in their shape, in time.
Every prompt holds a mark, which may be in no answer but its own. What the fake worker answers is a function of the
prompt: right requests beside wrong ones must get just that. A worker with a real model gets plans, of which some break
the contract: it must refuse them, and go on as another worker that never saw one. Clients with wrong certificates call
every gRPC port of two replicas with mutual TLS: a port accepts those that SECURITY.md names. Models with wrong files
are read: each must be refused in one sentence, in bounded time and memory.

A request is a function of ``seed`` and its number. What was found is kept in ``directory``, each with its request. The
last line is one JSON object; exit status 1 when anything was found.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from bench.fuzz.attacks import FLAGS, Attacks
from bench.fuzz.certificates import CertificateFuzzer
from bench.fuzz.config import SURFACES, FuzzConfig
from bench.fuzz.costs import CostFuzzer
from bench.fuzz.findings import Findings
from bench.fuzz.http import HttpFuzzer
from bench.fuzz.models import ModelFuzzer
from bench.fuzz.plans import PlanFuzzer
from bench.fuzz.scheduler import SchedulerFuzzer
from bench.fuzz.target import target
from bench.server import run_kept
from services.common.config import from_command_line


def main() -> None:
    config = from_command_line(FuzzConfig)
    run_kept(
        "fuzz", config.directory, partial(_measure_and_find, config), _draw, lambda figures: not figures["findings"]
    )


def _measure_and_find(config: FuzzConfig, directory: Path) -> dict[str, Any]:
    findings = Findings(directory, config.seed)
    return asyncio.run(measure(config, directory, findings)) | findings.figures()


def _draw(figures: dict[str, Any]) -> None:
    for shown in figures["findings_shown"]:
        print(f"FOUND {shown}")


async def measure(config: FuzzConfig, directory: Path, findings: Findings) -> dict[str, Any]:
    """All surfaces that are wanted, one after the other."""
    counts = {surface: config.share(surface) for surface in SURFACES}
    figures: dict[str, Any] = {"requests": sum(counts.values()), "seed": config.seed, "keys": config.keys}
    if counts["http"] or counts["grpc"]:
        with target(directory, keys=config.keys) as running:
            await running.wait_ready()
            if counts["http"]:
                figures["http"] = await HttpFuzzer(config, running.url, running.credentials, findings).run(
                    counts["http"]
                )
            if counts["grpc"]:
                figures["grpc"] = await SchedulerFuzzer(config, running, findings).run(counts["grpc"])
            await running.look(findings)
        running.look_at_logs(findings)
    if counts["models"]:
        figures["models"] = await asyncio.to_thread(ModelFuzzer(config, directory, findings).run, counts["models"])
    if config.surface in ("all", "attacks"):
        (directory / "attacks").mkdir()
        with target(directory / "attacks", keys=config.keys, flags=FLAGS) as running:
            await running.wait_ready()
            figures["attacks"] = await Attacks(running, findings).run()
            await running.look(findings)
        running.look_at_logs(findings)
    if counts["plans"]:
        figures["plans"] = await PlanFuzzer(config, directory, findings).run(counts["plans"])
    if counts["certificates"]:
        figures["certificates"] = await CertificateFuzzer(config, directory, findings).run(counts["certificates"])
    if counts["costs"]:
        figures["costs"] = await _costs(config, directory, findings, counts["costs"])
    return figures


async def _costs(config: FuzzConfig, directory: Path, findings: Findings, count: int) -> dict[str, Any]:
    """Search for the body that costs most, at services with the limits that they have by default."""
    own = directory / "costs"
    own.mkdir(exist_ok=True)
    with target(own, keys=False, flags=("log_level=WARNING",)) as running:
        await running.wait_ready()
        fuzzer = CostFuzzer(
            running.url, running.gateway_pid, findings, seed=config.seed, blocked_s=config.blocked_ms / 1e3
        )
        figures = await fuzzer.run(config.first, count)
        await running.look(findings)
    running.look_at_logs(findings)
    return figures


if __name__ == "__main__":
    main()
