"""Fuzz all interfaces of the services: ``make fuzz requests=1000000``, or ``python -m bench.fuzz surface=http``.

Each surface has its own checks:

* HTTP and gRPC: a gateway, a scheduler and a fake worker receive valid requests, requests with a wrong type, size or
  encoding, incomplete requests, and bytes that are no request. An answer must not be 5xx, UNKNOWN or INTERNAL, and
  errors must have their documented shape. Every prompt has a mark, which no other answer may contain. The answer of
  the fake worker is a function of the prompt, so valid requests must get exactly this answer.
* Plans: a worker with a real model receives plans, some of which break the contract. It must refuse these, and answer
  the others like a second worker that receives only valid plans.
* Certificates: clients call every gRPC port of two replicas with mutual TLS. A port must accept exactly the
  certificates that SECURITY.md names.
* Models: the services read models with wrong files. Each must be refused in one sentence, in bounded time and memory.

A request is a function of ``seed`` and its number. Each finding is kept in ``directory`` with its request. The last
line is one JSON object. The exit status is 1 if there is a finding.
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
    """Fuzz the chosen surfaces, one after the other."""
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
    """Search for the most expensive body, at services with default limits."""
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
