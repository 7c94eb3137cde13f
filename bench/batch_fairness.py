"""Measure how long one key's batch job takes beside another key's: ``python -m bench.batch_fairness``.

Runs gateways that share a store, a scheduler and a fake worker. Key ``probe`` runs jobs of 8 lines, one after the
other: first alone, then beside two loads of key ``load``: many jobs over one large file, and many jobs of one line. The
time of a job is from the upload of its file to its status ``completed``. A load that ends before the last probe is an
error. The last line is one JSON object. The exit status is 1 if a probe took longer than ``most_seconds``.
"""

import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.server import free_port, report
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.keys import hash_of, new_key
from tests.gateway.deployment import Deployment, Process

_TIMEOUT_S = 600.0
_POLL_S = 0.02
_SENDERS = 8  # threads that create jobs
_NAMES = ("probe", "load")
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchFairnessConfig(Config):
    """The flags."""

    gateways: Int = Field(1, ge=1, description="gateways on one store")
    large_jobs: Int = Field(48, ge=0, description="jobs of key load over one large file")
    large_lines: Int = Field(100_000, ge=1, le=100_000, description="lines of the large file")
    large_bytes: Int = Field(56_000_000, ge=1, description="size of the large file; shorter lines get a longer prompt")
    small_jobs: Int = Field(2000, ge=0, description="jobs of key load with one line each")
    lines: Int = Field(8, ge=1, description="lines of a probe's job")
    probes: Int = Field(8, ge=1, description="jobs of key probe, alone and again beside the loads")
    step_ms: Float = Field(1.0, ge=0, description="of the fake worker")
    concurrency: Int = Field(512, ge=1, description="batch_concurrency of each gateway")
    most_seconds: Float = Field(3.0, gt=0, description="the longest time that a probe beside the loads may take")


@dataclass(frozen=True)
class Server:
    """A running deployment and an SDK client for each key."""

    clients: dict[str, OpenAI]

    def upload(self, name: str, lines: list[str]) -> str:
        """Return the id of a file of ``lines`` that the key ``name`` owns."""
        content = io.BytesIO("\n".join(lines).encode())
        return self.clients[name].files.create(file=("in.jsonl", content), purpose="batch").id

    def begin(self, name: str, file_id: str) -> Batch:
        """Create a batch job of the key ``name``."""
        return self.clients[name].batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )

    def probe(self, lines: int) -> float:
        """Return the seconds from the upload to the end of a job. Raises ``RuntimeError`` if a line failed."""
        began = time.monotonic()
        batch = self.begin("probe", self.upload("probe", [line(number, 0) for number in range(lines)]))
        while batch.status not in _ENDED:
            time.sleep(_POLL_S)
            batch = self.clients["probe"].batches.retrieve(batch.id)
        if batch.request_counts is None or batch.request_counts.completed != lines:
            raise RuntimeError(f"a probe is {batch.status} with {batch.request_counts}")
        return time.monotonic() - began


@contextmanager
def server(config: BatchFairnessConfig, directory: Path) -> Iterator[Server]:
    """Run a deployment with two keys that have no limits."""
    keys = {name: new_key() for name in _NAMES}
    entry = '[[keys]]\nname = "{}"\nhash = "{}"\n'
    keys_file = directory / "keys.toml"
    keys_file.write_text("".join(entry.format(name, hash_of(key)) for name, key in keys.items()))
    keys_file.chmod(0o600)
    shared = {
        "store_dir": directory / "store",
        "api_keys_file": keys_file,
        "batch_concurrency": config.concurrency,
    }
    worker = {"page_count": 16384, "max_tokens_per_step": 4096, "step_ms": config.step_ms}
    with ExitStack() as stack:
        running = Deployment(directory, worker=worker, gateway=shared)
        stack.callback(running.stop)
        for number in range(1, config.gateways):
            flags = shared | {"port": free_port(), "scheduler_addresses": running.scheduler_address}
            other = Process(directory / f"gateway{number}.log", "services.gateway", **flags)
            stack.callback(other.kill)
        running.wait_ready()
        clients = {
            name: stack.enter_context(OpenAI(base_url=f"{running.url}/v1", api_key=key, timeout=_TIMEOUT_S))
            for name, key in keys.items()
        }
        yield Server(clients)
        running.gateway.kill()  # its jobs would run for minutes


def line(number: int, length: int) -> str:
    """Return a request that generates 1 to 4 tokens, in at least ``length`` characters."""
    body = {"model": "tokasaurus-builtin", "prompt": f"{number} sheep", "temperature": 0, "max_tokens": 1 + number % 4}
    request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
    body["prompt"] += "." * max(0, length - len(json.dumps(request)))
    return json.dumps(request)


def load(config: BatchFairnessConfig, running: Server) -> list[str]:
    """Create the jobs of key ``load``. Returns the ids of the last large job and of the last small one."""
    length = config.large_bytes // config.large_lines - 1
    large = running.upload("load", [line(number, length) for number in range(config.large_lines)])
    small = running.upload("load", [line(0, 0)])
    with ThreadPoolExecutor(_SENDERS) as senders:
        last = []
        for file_id, count in ((large, config.large_jobs), (small, config.small_jobs)):
            jobs = list(senders.map(lambda name: running.begin("load", name), [file_id] * count))
            last += [jobs[-1].id] if jobs else []
    return last


def times(seconds: list[float]) -> dict[str, float]:
    """Return the median and the maximum."""
    return {"median_s": round(statistics.median(seconds), 2), "most_s": round(max(seconds), 2)}


def measure(config: BatchFairnessConfig) -> dict[str, Any]:
    """Run the probes alone and beside the loads. Raises ``RuntimeError`` if a load ends too early."""
    with tempfile.TemporaryDirectory() as directory, server(config, Path(directory)) as running:
        running.probe(config.lines)  # warm up
        alone = [running.probe(config.lines) for _ in range(config.probes)]
        last = load(config, running)
        beside = []
        for _ in range(config.probes):
            beside.append(running.probe(config.lines))
            print(f"beside the loads: {beside[-1]:.2f} s", flush=True)
        statuses = [running.clients["load"].batches.retrieve(name).status for name in last]
    if any(status in _ENDED for status in statuses):
        raise RuntimeError(f"a load ended before the last probe ({statuses}): raise large_jobs or small_jobs")
    return {"gateways": config.gateways, "alone": times(alone), "beside": times(beside)}


def main() -> None:
    config = from_command_line(BatchFairnessConfig)
    figures = measure(config)
    table = Table(title=f"jobs of {config.lines} lines, {config.gateways} gateways")
    for column in ("", "median s", "most s"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("alone", "beside"):
        table.add_row(name, *(f"{seconds:.2f}" for seconds in figures[name].values()))
    Console().print(table)
    report(figures)
    if figures["beside"]["most_s"] > config.most_seconds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
