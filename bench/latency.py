"""Measure the latency of streams of any OpenAI server: ``python -m bench.latency [concurrent=1,8,64]``.

The time per output token of a request is the time from its first text to its last, divided by its tokens less one. The
time to first token begins with the request, on an open connection. Figures are medians over all requests. Prompts are
random and different, so that none is cached. The last line is one JSON object.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import Field

from bench.gpus import EnergyMeter
from bench.send import failures, send_all
from bench.server import report
from bench.target import Target, TargetConfig, first_target, ratios, rival
from services.cli.bench.exchange import Reply
from services.cli.bench.stream_times import HEADINGS, StreamTimes
from services.common.config import from_command_line
from services.common.flags import Float, Int, Ints


class LatencyConfig(TargetConfig):
    """The flags."""

    concurrent: Ints = Field((1, 8, 64), min_length=1, description="numbers of concurrent streams")
    prompt_tokens: Int = Field(128, ge=1)
    output_tokens: Int = Field(256, ge=2)
    vocab_size: Int = Field(32768, ge=2, description="prompts are random token ids from 1 to this number less one")
    temperature: Float = Field(0.6, ge=0)
    rounds: Int = Field(5, ge=1, description="measured rounds of each number of streams, after a warm-up")


def main() -> None:
    config = from_command_line(LatencyConfig)
    figures: dict[str, Any] = {}
    against = rival(config)
    if against is not None:
        figures["rival"] = measure(config, against)
    with first_target(config) as target:
        figures |= measure(config, target)
    for count in config.concurrent:
        others = config.baselines(f"latency-{count}")
        if against is not None:
            others["rival"] = figures["rival"][str(count)]["per_token_ms"]
        own = figures[str(count)]
        if others:
            print(f"{count} at once, time per output token:")
        own["ratio"] = ratios(own["per_token_ms"], others, lower_is_better=True)
    report(figures)


def measure(config: LatencyConfig, target: Target) -> dict[str, dict[str, float]]:
    """Return times in milliseconds, and joules, by number of streams."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{target.name}: {config.prompt_tokens} tokens in, {config.output_tokens} out")
    for column in HEADINGS:
        table.add_column(column, justify="right")
    found = {}
    rng = np.random.default_rng(7)
    for count in config.concurrent:
        measure_round(config, target, count, rng)
        meter = EnergyMeter(target.gpus())
        replies = [reply for _ in range(config.rounds) for reply in measure_round(config, target, count, rng)]
        energy = meter.per_token(sum(reply.completion_tokens for reply in replies))
        failures(replies)
        times = StreamTimes.of(replies)
        if times is None:
            raise SystemExit("no request was answered")
        table.add_row(*times.row(count))
        found[str(count)] = asdict(times) | energy
    Console().print(table)
    return found


def measure_round(config: LatencyConfig, target: Target, count: int, rng: np.random.Generator) -> list[Reply]:
    """Run ``count`` streams that begin at the same time."""
    bodies = [
        {
            "model": target.model,
            "prompt": rng.integers(1, config.vocab_size, config.prompt_tokens).tolist(),
            "max_tokens": config.output_tokens,
            "ignore_eos": True,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]
    return send_all(f"{target.url}/v1/completions", bodies, config.clients)


if __name__ == "__main__":
    main()
