"""How many tokens one gateway process turns into answers: ``python -m bench.gateway_capacity [stream=T]``.

A fake worker that answers at once, a real scheduler, a real gateway, and a client that asks for many samples of few
prompts. All of them are processes of this host: where cores are few, the CPU seconds of each say more than the rate.
The last line is one JSON object.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.client import failures, makespan, send_all
from bench.problems import few_shot_prompts, read_problems
from bench.processes import Usage
from bench.scheduler_capacity import processes
from bench.server import free_port, report, wait_until_ready
from services.common.config import from_command_line
from services.common.flags import Bool, Config, Int
from services.common.model_files import read_card
from tests.fakes.model import FakeShape

MAX_TOKENS, LONGEST_PROMPT = 1024, 1024
FIRST_MERGED_TOKEN = 261  # of the built-in model: before it are special tokens and single bytes


class GatewayConfig(Config):
    """The flags."""

    model: str = Field("builtin", description="directory for names and text, no weights: e.g. of bench.model")
    sequences: Int = Field(8192, ge=1, description="running at once")
    requests: Int | None = Field(None, ge=1, description="HTTP requests; default: 32, or 64 streams")
    samples: Int | None = Field(None, ge=1, description="n of each; default: 1024, or 128 when streaming")
    mean_tokens: Int = Field(153, ge=1, description="of an answer, whose length is geometric; a model's own ends count")
    stream: Bool = False
    clients: Int = Field(1, ge=1, description="client processes")


def main() -> None:
    config = from_command_line(GatewayConfig)
    requests = config.requests or (64 if config.stream else 32)
    samples = config.samples or (128 if config.stream else 1024)
    prompts = few_shot_prompts(read_problems(), requests)
    with gateway(config) as url:
        name = read_card(config.model).name
        bodies = [
            {
                "model": name, "prompt": prompt, "n": samples, "max_tokens": MAX_TOKENS, "temperature": 0.6,
                "stop": ["Question:"], "seed": number,
                **({"stream": True, "stream_options": {"include_usage": True}} if config.stream else {}),
            }
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        send_all(f"{url}/v1/completions", [body | {"n": 1, "max_tokens": 2} for body in bodies])  # warm up
        usage = Usage(os.getpid())
        before = usage.seconds()
        replies = send_all(f"{url}/v1/completions", bodies, config.clients)
        after = usage.seconds()
    seconds, failed = makespan(replies), failures(replies)
    tokens = sum(reply.completion_tokens for reply in replies)
    used = {name: after[name] - before[name] for name in ("gateway", "scheduler", "worker")}

    table = Table(title=f"{requests} {'streams' if config.stream else 'requests'} of {samples} samples")
    for column in ("process", "CPU seconds", "share of a core", "CPU seconds per million tokens"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, value in used.items():
        table.add_row(name, f"{value:.2f}", f"{value / seconds:.0%}", f"{value / tokens * 1e6:.2f}")
    Console().print(table)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tok/s")
    report(
        {
            "tokens_per_second": tokens / seconds,
            "tokens": tokens,
            "seconds": seconds,
            "failures": failed,
            "cpu_s_per_million_tokens": {name: value / tokens * 1e6 for name, value in used.items()},
            "tokens_per_gateway_cpu_second": tokens / max(used["gateway"], 1e-9),
            "stream": config.stream,
        }
    )


@contextmanager
def gateway(config: GatewayConfig):
    """Fake worker, scheduler and gateway; yields the gateway's base URL."""
    port = free_port()
    with processes(worker_shape(config), config.model) as scheduler:
        flags = (f"model={config.model}", f"port={port}", f"scheduler_addresses={scheduler}")
        process = subprocess.Popen([sys.executable, "-m", "services.gateway", *flags])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            process.wait()


def worker_shape(config: GatewayConfig) -> FakeShape:
    """With pages for every limit, so that admission is not what is measured."""
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
        eos_every=config.mean_tokens if builtin else 0,  # else the model's list of ends decides
    )


if __name__ == "__main__":
    main()
