"""Compare a server without tuning flags to a tuned server: ``python -m bench.defaults model=DIR tuned='...'``.

Both run in turn with the same ``shared`` flags and are measured by the same programs: repeated sampling
(``bench.monkeys``), a mixed workload (``bench.mixed``), time per output token (``bench.latency``) and live traffic
(``toka-bench serve``). A ratio above 1 means that the server without flags is better. With ``cold=T``, the first start
of each server has an empty cache of compiled kernels. The last line is one JSON object.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from bench import latency, mixed, monkeys
from bench.server import Server, report, serve
from bench.target import Target
from services.common.config import from_command_line
from services.common.flags import Bool, Config, Float, Int, Strings
from services.common.host.descriptors import raise_limit

WORKLOADS = ("monkeys", "mixed", "latency", "live")
# Figures for which less is better.
_TIMES = ("latency", "live", "start")


class DefaultsConfig(Config):
    """The flags of this program."""

    model: str = Field(min_length=1, description="model of both servers")
    shared: str = Field("load_format=dummy", description="flags of both servers, as a shell takes them")
    tuned: str = Field("", description="flags of the tuned server alone; empty: measure only the other server")
    workloads: Strings = Field(WORKLOADS, description=f"any of {','.join(WORKLOADS)}")
    cold: Bool = Field(False, description="start each server twice, first with an empty compile_cache_dir")
    prompts: Int = Field(16, ge=1, description="prompts of repeated sampling, with 1,024 samples each")
    requests: Int = Field(4096, ge=1, description="requests of the mixed workload")
    rate: Float = Field(40.0, gt=0, description="requests per second of live traffic")
    seconds: Float = Field(8.0, gt=0, description="duration of live traffic")


def main() -> None:
    config = from_command_line(DefaultsConfig)
    raise_limit()
    figures = {"default": measure_server(config, "")}
    if config.tuned:
        figures["tuned"] = measure_server(config, config.tuned)
    figures["ratio"] = compare(figures["default"], figures.get("tuned", {}))
    print_table(figures)
    report(figures)


def measure_server(config: DefaultsConfig, flags: str) -> dict[str, float]:
    """Start a server with ``flags``, and return its figures by name."""
    given = dict(flag.split("=", 1) for flag in shlex.split(f"model={config.model} {config.shared} {flags}"))
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="toka-bench-") as empty:
        if config.cold:
            given["compile_cache_dir"] = empty
            found["start: cold, s"] = _start(given)
        began = time.monotonic()
        with serve(**given) as server:
            found["start: warm, s" if config.cold else "start, s"] = time.monotonic() - began
            target = Target("toka", server.base_url, server.model, server.process.pid)
            for name in config.workloads:
                figures = _MEASURES[name](config, target, server)
                print(json.dumps(figures), flush=True)
                found |= figures
    return found


def compare(default: dict[str, float], tuned: dict[str, float]) -> dict[str, float]:
    """Return by how many times the default server is better, for each figure that both servers have."""
    shared = [name for name in default if name in tuned]
    return {
        name: tuned[name] / default[name] if name.startswith(_TIMES) else default[name] / tuned[name] for name in shared
    }


def print_table(figures: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("", *figures):
        table.add_column(column, justify="right" if column else "left")
    for name in figures["default"]:
        table.add_row(name, *(f"{column[name]:,.3f}" if name in column else "" for column in figures.values()))
    Console(width=120).print(table)


def _start(flags: dict[str, str]) -> float:
    """Return the seconds until a server is ready, and end it."""
    began = time.monotonic()
    with serve(**flags):
        return time.monotonic() - began


def _monkeys(config: DefaultsConfig, target: Target, server: Server) -> dict[str, float]:
    found = monkeys.measure(monkeys.MonkeysConfig(prompts=config.prompts), target)
    return {
        "monkeys: output tokens/s": found["tokens_per_second"],
        "monkeys: steady tokens/s": found["steady_tokens_per_second"] or 0.0,
    }


def _mixed(config: DefaultsConfig, target: Target, server: Server) -> dict[str, float]:
    found = mixed.measure(mixed.MixedConfig(requests=config.requests), target)
    return {"mixed: output tokens/s": found["tokens_per_second"]}


def _latency(config: DefaultsConfig, target: Target, server: Server) -> dict[str, float]:
    found = latency.measure(latency.LatencyConfig(rounds=3), target)
    return {f"latency: ms per token, {count} streams": times["per_token_ms"] for count, times in found.items()}


def _live(config: DefaultsConfig, target: Target, server: Server) -> dict[str, float]:
    """Measure requests that arrive at random, with prompts of 64 to 512 tokens and answers of 128 tokens."""
    with tempfile.TemporaryDirectory(prefix="toka-bench-") as directory:
        path = Path(directory) / "live.json"
        command = [sys.executable, "-m", "services.cli.bench", "serve", "--url", target.url, "--rate", str(config.rate)]
        command += ["--requests", str(int(config.rate * config.seconds)), "--prompt-tokens", "64-512"]
        command += ["--output-tokens", "128", "--ignore-eos", "--seed", "1", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(path.read_text())
    first, between = (found[name] for name in ("first_token_ms", "per_token_ms"))
    return {
        "live: ms to first token, mean": first["mean"],
        "live: ms to first token, p99": first["p99"],
        "live: ms per token, mean": between["mean"],
    }


_MEASURES = {"monkeys": _monkeys, "mixed": _mixed, "latency": _latency, "live": _live}

if __name__ == "__main__":
    main()
