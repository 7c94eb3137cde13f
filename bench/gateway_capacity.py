"""Measure the throughput of gateway processes: ``python -m bench.gateway_capacity [stream=T] [gateways=4]``.

Runs a fake worker that answers at once, a real scheduler, real gateways, and a client. The client requests many samples
of few prompts, to measure tokens per second. With ``prompt_tokens=200 max_tokens=1``, it requests one sample of each of
many prompts, to measure requests per second. All are processes of this host: with few cores, the CPU seconds of each
process say more than the rate. The last line is one JSON object.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.problems import read_problems
from bench.processes import Usage
from bench.scheduler_capacity import processes
from bench.send import failures, send_all
from bench.server import START_TIMEOUT_S, report
from services.cli.bench.clients import makespan
from services.cli.bench.problems import few_shot_prompts
from services.common.config import from_command_line
from services.common.flags import Bool, Config, Int
from services.common.model.files import read_card
from services.common.process.handover import Handover, listen
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.numbers import Numbers
from services.launcher.deployment import ChildSpec
from services.launcher.readiness import wait_until_ready
from tests.fakes.model import FakeShape

MAX_TOKENS, LONGEST_PROMPT = 1024, 1024
FIRST_MERGED_TOKEN = 261  # of the built-in model, behind special tokens and single bytes
VOCAB_SIZE = 2048  # of the built-in model


class GatewayConfig(Config):
    """The flags."""

    model: str = Field("builtin", description="model directory, which needs no weights (see bench.model)")
    sequences: Int = Field(8192, ge=1, description="running sequences")
    requests: Int | None = Field(None, ge=1, description="HTTP requests; default: 32, or 64 streams, or 2048 prompts")
    samples: Int | None = Field(None, ge=1, description="samples of each; default: 1024, 128 when streaming, or 1")
    mean_tokens: Int = Field(153, ge=1, description="mean of the geometric answer lengths, for the built-in model")
    stream: Bool = False
    prompt_tokens: Int | None = Field(
        None, ge=1, description="length of random prompts, different for each request; default: few-shot text"
    )
    max_tokens: Int = Field(MAX_TOKENS, ge=1, le=MAX_TOKENS)
    gateways: Int = Field(1, ge=1, description="gateway processes that share a port")
    clients: Int = Field(1, ge=1, description="client processes")


def main() -> None:
    config = from_command_line(GatewayConfig)
    with gateways(config) as (url, numbers):
        bodies = ask_for(config)
        send_all(f"{url}/v1/completions", [body | {"n": 1, "max_tokens": 2} for body in bodies])  # warm up
        usage = Usage(os.getpid())
        before, answered_before = usage.seconds(), answered(numbers)
        replies = send_all(f"{url}/v1/completions", bodies, config.clients)
        after, answered_after = usage.seconds(), answered(numbers)
    seconds, failed = makespan(replies), failures(replies)
    tokens = sum(reply.completion_tokens for reply in replies)
    used = {name: after[name] - before[name] for name in ("gateway", "scheduler", "worker")}

    requests, samples = len(bodies), bodies[0]["n"]
    table = Table(title=f"{requests} {'streams' if config.stream else 'requests'} of {samples} samples")
    for column in ("process", "CPU seconds", "share of a core", "ms per request", "CPU seconds per million tokens"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, value in used.items():
        shares = (f"{value / seconds:.0%}", f"{value / requests * 1e3:.3f}", f"{value / tokens * 1e6:.2f}")
        table.add_row(name, f"{value:.2f}", *shares)
    Console().print(table)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tok/s")
    report(
        {
            "tokens_per_second": tokens / seconds,
            "tokens": tokens,
            "seconds": seconds,
            "failures": failed,
            "requests_per_second": requests / seconds,
            "cpu_ms_per_request": {name: value / requests * 1e3 for name, value in used.items()},
            "cpu_s_per_million_tokens": {name: value / tokens * 1e6 for name, value in used.items()},
            "requests_by_gateway": [now - then for now, then in zip(answered_after, answered_before, strict=True)],
            "tokens_per_gateway_cpu_second": tokens / max(used["gateway"], 1e-9),
            "stream": config.stream,
        }
    )


def ask_for(config: GatewayConfig) -> list[dict[str, Any]]:
    """Return the bodies of all requests."""
    if config.prompt_tokens is None:
        requests = config.requests or (64 if config.stream else 32)
        prompts = few_shot_prompts(read_problems(), requests)
        common = {"n": config.samples or (128 if config.stream else 1024), "stop": ["Question:"]}
    else:
        requests = config.requests or 2048
        shape = (requests, config.prompt_tokens)
        prompts = np.random.default_rng(0).integers(FIRST_MERGED_TOKEN, VOCAB_SIZE, shape).tolist()
        common = {"n": config.samples or 1}
    common |= {"model": read_card(config.model).name, "max_tokens": config.max_tokens, "temperature": 0.6}
    if config.stream:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    return [{"prompt": prompt, "seed": number, **common} for number, prompt in enumerate(prompts)]


@contextmanager
def gateways(config: GatewayConfig):
    """Run worker, scheduler and gateways. Yield the gateways' base URL and the files with their counts."""
    with processes(worker_shape(config), config.model) as scheduler, tempfile.TemporaryDirectory() as directory:
        flags = (f"model={config.model}", f"scheduler_addresses={scheduler}")
        command = [sys.executable, "-m", "services.gateway", *flags]
        specs, children = [], []
        for index, listener in enumerate(listen("127.0.0.1", 0, config.gateways)):
            with listener:
                handover = Handover(directory, index, config.gateways, listener.fileno())
                environment = os.environ | handover.environment
                children.append(subprocess.Popen(command, env=environment, pass_fds=[handover.listener]))
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            specs.append(ChildSpec(handover.name, "gateway", url, flags, handover=handover))
        try:
            for spec in specs:
                asyncio.run(asyncio.wait_for(wait_until_ready(spec), START_TIMEOUT_S))
            yield url, handover.counter_files
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait()


def answered(numbers: list[Path]) -> list[int]:
    """Return the number of requests that each gateway has answered. A single gateway has no file and counts as 0."""
    return [int(sum(RequestMetrics(Numbers.sum_of([path])).end_to_end.counts)) for path in numbers]


def worker_shape(config: GatewayConfig) -> FakeShape:
    """Return a shape with enough pages for every limit, so that admission is no bottleneck."""
    card = read_card(config.model)
    pages = config.sequences * -(-(MAX_TOKENS + LONGEST_PROMPT) // 16) + 1024
    builtin = config.model == "builtin"
    return FakeShape(
        vocab_size=card.vocab_size,
        page_count=pages,
        max_slots=config.sequences,
        max_tokens_per_step=2 * config.sequences + 512,
        max_context_tokens=min(card.max_context_tokens, 4096),
        first_token=FIRST_MERGED_TOKEN if builtin else 16,
        eos_token_id=card.eos_token_ids[0],
        eos_every=config.mean_tokens if builtin else 0,  # other models have a list of tokens that end an answer
    )


if __name__ == "__main__":
    main()
