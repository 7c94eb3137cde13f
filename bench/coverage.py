"""Measure repeated sampling: the share of problems that at least one of k samples solves.

``python -m bench.coverage [samples=100] [problems=60] [temperature=0.8] [base_url=...] [output=coverage.png]``

Without ``base_url``, the program starts a server. ``pass@k`` is the unbiased estimator of Chen et al. 2021
(arXiv:2107.03374, section 2.1).
"""

import asyncio
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import openai
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.problems import read_problems
from bench.server import report, serve
from services.cli.bench.problems import Problem
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int


class CoverageConfig(Config):
    samples: Int = Field(100, ge=1, description="samples for each problem")
    problems: Int = Field(60, ge=1, description="how many problems, half of them from GSM8K's test set")
    temperature: Float = Field(0.8, gt=0)
    max_tokens: Int = Field(256, ge=1)
    seed: Int = 0
    concurrency: Int = Field(8, ge=1, description="problems in flight")
    base_url: str | None = Field(None, description="a running server, e.g. http://127.0.0.1:10210")
    output: str = "coverage.png"


def main() -> None:
    config = from_command_line(CoverageConfig)
    problems = choose_problems(config.problems)
    with nullcontext() if config.base_url else serve(kv_cache_num_tokens="(256 * 1024)") as server:
        base_url = config.base_url or server.base_url
        start = time.perf_counter()
        solved, tokens = asyncio.run(sample_all(config, f"{base_url}/v1", problems))
        seconds = time.perf_counter() - start
    groups = {"all": range(len(problems))}
    for source in sorted({problem.source for problem in problems}):
        groups[source] = [index for index, problem in enumerate(problems) if problem.source == source]
    ks = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= config.samples]
    curves = {name: coverage(solved[list(rows)], ks) for name, rows in groups.items()}

    console = Console()
    table = Table(title=f"{len(problems)} unseen problems, {config.samples} samples each")
    table.add_column("problems")
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    for name, curve in curves.items():
        table.add_row(f"{name} ({len(groups[name])})", *(f"{value:.1%}" for value in curve))
    console.print(table)
    plot(curves, ks, Path(config.output))
    console.print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tok/s. Curve: {config.output}")
    figures = {f"pass@{k}": value for k, value in zip(ks, curves["all"], strict=True)}
    by_source = {name: dict(zip(map(str, ks), curve, strict=True)) for name, curve in curves.items()}
    report({**figures, "by_source": by_source, "tokens_per_second": tokens / seconds, "output": config.output})


def choose_problems(count: int) -> list[Problem]:
    """Return the first ``count`` problems, taken from each source in turn."""
    by_source: dict[str, list[Problem]] = {}
    for problem in read_problems():
        by_source.setdefault(problem.source, []).append(problem)
    longest = max(map(len, by_source.values()))
    mixed = [row[index] for index in range(longest) for row in by_source.values() if index < len(row)]
    return mixed[:count]


async def sample_all(config: CoverageConfig, base_url: str, problems: list[Problem]) -> tuple[np.ndarray, int]:
    """Return which answers are right, bool ``[problems, samples]``, and the number of generated tokens."""
    solved = np.zeros((len(problems), config.samples), dtype=bool)
    slots, tokens = asyncio.Semaphore(config.concurrency), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=3600) as client:
        model = (await client.models.list()).data[0].id
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("samples", total=solved.size)

            async def sample(row: int, problem: Problem) -> int:
                async with slots:
                    answer = await client.completions.create(
                        model=model,
                        prompt=problem.prompt,
                        n=config.samples,
                        temperature=config.temperature,
                        max_tokens=config.max_tokens,
                        seed=config.seed + row,
                    )
                solved[row] = [problem.solved_by(choice.text) for choice in answer.choices]
                progress.advance(task, config.samples)
                return answer.usage.completion_tokens

            tokens = sum(await asyncio.gather(*(sample(row, problem) for row, problem in enumerate(problems))))
    return solved, tokens


def coverage(solved: np.ndarray, ks: list[int]) -> list[float]:
    """Return pass@k for each k from ``solved [problems, samples]`` bool: the mean of ``1 - C(n - c, k) / C(n, k)``."""
    samples = solved.shape[1]
    wrong = samples - solved.sum(axis=1)
    values = []
    for k in ks:
        factors = (wrong[:, None] - np.arange(k)) / (samples - np.arange(k))
        values.append(float(np.mean(1 - np.prod(np.maximum(factors, 0), axis=1))))
    return values


def plot(curves: dict[str, list[float]], ks: list[int], target: Path) -> None:
    """Write the curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(ks, curve, marker="o", label=name)
    axes.set(xscale="log", xlabel="samples k", ylabel="problems solved by any of k samples", ylim=(0, 1))
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
