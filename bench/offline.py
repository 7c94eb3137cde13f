"""Compare ``LLM.generate`` with HTTP requests for many prompts: ``python -m bench.offline [prompts=1000]``.

``LLM.generate`` uses a real scheduler and a fake worker that answers at once. HTTP requests use several connections to
a real gateway in front of another such pair. Each is measured several times, in turns. The last line is one JSON object
with the medians and their ratio.
"""

import os
import statistics
import time
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.gateway_capacity import FIRST_MERGED_TOKEN, VOCAB_SIZE, GatewayConfig, gateways, worker_shape
from bench.processes import Usage
from bench.scheduler_capacity import processes
from bench.send import failures, send_all
from bench.server import report
from services.cli.bench.clients import makespan
from services.client import LLM, SamplingParams
from services.common.config import from_command_line
from services.common.flags import Config, Int


class OfflineConfig(Config):
    """The flags."""

    prompts: Int = Field(1000, ge=1, description="prompts that are sent at once")
    prompt_tokens: Int = Field(100, ge=1, le=1024, description="random tokens in each prompt")
    max_tokens: Int = Field(50, ge=1, le=1024, description="tokens of each answer")
    repeats: Int = Field(5, ge=1, description="measurements of each way")


def main() -> None:
    config = from_command_line(OfflineConfig)
    sizes = GatewayConfig(
        sequences=max(256, config.prompts), prompt_tokens=config.prompt_tokens, max_tokens=config.max_tokens
    )
    prompts = random_prompts(config)
    runs: dict[str, list[dict[str, float]]] = {"llm": [], "http": []}
    with processes(worker_shape(sizes)) as scheduler, LLM(address=scheduler) as llm, gateways(sizes) as (url, _):
        for turn in range(config.repeats + 1):  # the first turn is the warm-up
            times = {"llm": by_llm(llm, prompts, config), "http": by_http(url, prompts, config)}
            for way in runs if turn else ():
                runs[way].append(times[way])
    figures: dict[str, Any] = {"prompts": config.prompts, "prompt_tokens": config.prompt_tokens}
    table = Table(title=f"{config.prompts} prompts of {config.prompt_tokens} tokens, {config.max_tokens} tokens each")
    for column in ("way", "prompts per second", "CPU seconds of the script or gateway"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, measured in runs.items():
        rate = statistics.median(config.prompts / each["seconds"] for each in measured)
        cpu = statistics.median(each["cpu"] for each in measured)
        figures[way] = {"prompts_per_second": rate, "cpu_seconds": cpu, "runs": measured}
        table.add_row(way, f"{rate:.0f}", f"{cpu:.2f}")
    Console().print(table)
    report(figures | {"ratio": figures["llm"]["prompts_per_second"] / figures["http"]["prompts_per_second"]})


def random_prompts(config: OfflineConfig) -> list[list[int]]:
    """Return random token ids, different for each prompt and the same in each run."""
    shape = (config.prompts, config.prompt_tokens)
    return np.random.default_rng(0).integers(FIRST_MERGED_TOKEN, VOCAB_SIZE, shape).tolist()


def by_llm(llm: LLM, prompts: list[list[int]], config: OfflineConfig) -> dict[str, float]:
    """Return the seconds until the last answer, and the CPU seconds of this process."""
    params = SamplingParams(max_tokens=config.max_tokens, temperature=0.6, seed=1)
    begun, used = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - used
    if any(output.error for output in outputs):
        raise SystemExit(str(next(output.error for output in outputs if output.error)))
    return {"seconds": seconds, "cpu": cpu}


def by_http(url: str, prompts: list[list[int]], config: OfflineConfig) -> dict[str, float]:
    """Send a request for each prompt. Return the seconds until the last answer, and the CPU seconds of the gateway."""
    common = {"max_tokens": config.max_tokens, "temperature": 0.6, "seed": 1}
    usage = Usage(os.getpid())
    before = usage.seconds()
    replies = send_all(f"{url}/v1/completions", [common | {"prompt": prompt} for prompt in prompts])
    if failures(replies):
        raise SystemExit(f"{failures(replies)} requests failed")
    return {"seconds": makespan(replies), "cpu": usage.seconds()["gateway"] - before["gateway"]}


if __name__ == "__main__":
    main()
