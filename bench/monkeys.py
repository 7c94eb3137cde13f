"""Measure repeated sampling on any OpenAI server: ``python -m bench.monkeys [url=... | server_flags='model=...']``.

Requests many samples of 4-shot GSM8K prompts, all at once. The end-to-end rate is the tokens of all answers over the
time from the first request to the last answer. The steady rate counts only the time in which at least 97 % of the
maximum number of sequences run. The last line is one JSON object.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from bench.problems import PROBLEMS
from bench.send import failures, send_all
from bench.server import report
from bench.target import Target, TargetConfig, measure_throughput, median_run
from bench.watch import Watch, during, plot, steady, summary
from services.cli.bench.clients import makespan
from services.cli.bench.problems import few_shot_prompts, read_problems
from services.common.config import from_command_line
from services.common.flags import Float, Int


class MonkeysConfig(TargetConfig):
    """The flags. With a prefix cache, a repeat finds its prompts there; these are a hundredth of all tokens."""

    prompts: Int = Field(32, ge=1)
    samples: Int = Field(1024, ge=1, description="samples of each prompt")
    requests_per_prompt: Int = Field(1, ge=1, description="requests that share the samples of a prompt")
    shots: Int = Field(4, ge=0, description="solved problems before the question")
    problems: str = Field(str(PROBLEMS), description="JSONL file with question and answer, such as those of GSM8K")
    max_tokens: Int = Field(1024, ge=1)
    temperature: Float = Field(0.6, ge=0)
    repeats: Int = Field(1, ge=1)
    plot: str | None = Field(None, description="PNG: running sequences and tokens/s over the last repeat")

    @model_validator(mode="after")
    def _parts(self) -> "MonkeysConfig":
        if self.samples % self.requests_per_prompt:
            raise ValueError(f"flag requests_per_prompt={self.requests_per_prompt}: does not divide {self.samples}")
        return self


def main() -> None:
    config = from_command_line(MonkeysConfig)
    report(measure_throughput(config, "monkeys", partial(measure, config)))


def measure(config: MonkeysConfig, target: Target) -> dict[str, Any]:
    """Measure all repeats on one server. Return the figures of the median run."""
    runs = [measure_once(config, target, drawn=index == config.repeats - 1) for index in range(config.repeats)]
    middle = median_run(runs)
    print_table(config, target, middle)
    spread = ", ".join(f"{rate:.0f}" for rate in middle["runs"])
    print(f"{target.name}: {middle['tokens']} tokens in {middle['seconds']:.2f} s, end to end {spread} tok/s")
    return middle


def print_table(config: MonkeysConfig, target: Target, middle: dict[str, Any]) -> None:
    """Print the figures end to end and in the steady state."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{target.name}: {config.prompts} prompts x {config.samples} samples")
    for column in ("", "end to end", "steady"):
        table.add_column(column, justify="right" if column else "left")
    for name in dict.fromkeys((*middle["whole"], *middle["steady"])):
        table.add_row(name, *(_written(middle[part].get(name)) for part in ("whole", "steady")))
    Console().print(table)


def measure_once(config: MonkeysConfig, target: Target, *, drawn: bool) -> dict[str, Any]:
    """Measure one run. ``whole`` and ``steady`` come from ``/metrics``, the rest from the client."""
    url = f"{target.url}/v1/completions"
    problems = read_problems(Path(config.problems))
    shared = {"model": target.model, "temperature": config.temperature, "stop": ["Question:"]}
    bodies = [
        shared | {"prompt": prompt, "n": config.samples // config.requests_per_prompt, "max_tokens": config.max_tokens}
        for prompt in few_shot_prompts(problems, config.prompts, config.shots)
        for _ in range(config.requests_per_prompt)
    ]
    send_all(url, [shared | {"prompt": problems[-1].prompt, "max_tokens": 4}])  # warm up
    with Watch(target) as watch:
        replies = send_all(url, bodies, config.clients, watch.look_in_time)
    if drawn and config.plot is not None:
        plot(during(watch.samples, replies), Path(config.plot))
    tokens, seconds = sum(reply.completion_tokens for reply in replies), makespan(replies)
    settled = summary(steady(watch.samples))
    return {
        "tokens_per_second": tokens / seconds,
        "steady_tokens_per_second": settled.get("tokens_per_second"),
        "tokens": tokens,
        "seconds": seconds,
        "mean_prompt_tokens": statistics.mean(reply.prompt_tokens for reply in replies),
        "mean_completion_tokens": tokens / (config.prompts * config.samples),
        "failures": failures(replies),
        "whole": summary(during(watch.samples, replies)),
        "steady": settled,
    }


def _written(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3f}"


if __name__ == "__main__":
    main()
