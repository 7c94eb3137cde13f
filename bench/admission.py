"""Measure the benefit of the page forecast: ``python -m bench.admission [trace=all] [plot=admission.png]``.

Runs the scheduler's core with a simulated worker. All samples of a trace are queued before the first step. There are
four policies of admission:

* ``static``: a sequence starts if the free pages hold its prompt and its limit, as in engines without a forecast;
* ``guaranteed``: a sample is admitted if all sequences fit at every step up to their limits, so none is preempted;
* ``predicted``: as ``guaranteed``, but with lengths that are predicted from finished samples;
* ``oracle``: all lengths are known. Each sample is a request with its true length as its limit.

All policies count the pages of a shared prompt once. Under ``static``, a sample that does not fit blocks the samples
behind it. The oracle computes the last part of a shared prompt, behind its last whole page, for each sample.

Figures are in steps, not in seconds. ``tok/step`` is over the whole trace, ``steady`` over the steps until 90 % of the
samples have finished, and ``batch`` is the mean size. On ``mix`` every limit is the true length, so ``guaranteed`` and
``oracle`` are equal. The last line is one JSON object, with:

* ``guaranteed_over_static``: ratio of tokens per step on ``mix``, or on the only trace that ran;
* ``predicted_over_oracle``: smallest ratio of tokens per step of all traces; ``steady_...``: in the steady part;
* ``recomputed_share``: largest share of tokens under ``predicted`` that preemptions caused to be computed again.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.server import report
from bench.simulation import Simulation
from bench.traces import (
    LONGEST_ANSWER,
    LONGEST_PROMPT,
    VOCAB_SIZE,
    Trace,
    mix,
    mix_loose,
    monkeys,
    one_prompt_twice,
)
from services.common.config import from_command_line
from services.common.flags import Config, Int
from services.common.plan.types import WorkerLimits
from services.scheduler.core.future.admission import AdmissionControl, forecast_running
from services.scheduler.core.future.sequences import Sequences
from services.scheduler.core.request import AdmissionMode

STEADY = 0.9  # of the samples


class BenchConfig(Config):
    """The flags. With the defaults, pages are the bottleneck under every policy."""

    trace: Literal["monkeys", "mix", "mix_loose", "all"] = "all"
    plot: str | None = Field(None, description="PNG to write: pages in use and running sequences over the steps")
    prompts: Int = Field(32, ge=1, description="prompts of the trace monkeys")
    samples: Int = Field(1024, ge=2, description="samples of each prompt of monkeys")
    requests: Int = Field(8192, ge=1, description="requests of mix and mix_loose")
    kv_cache_num_tokens: Int = Field(512 * 1024, ge=LONGEST_PROMPT + LONGEST_ANSWER)
    page_size: Int = Field(16, ge=1, le=1024)
    max_seqs_per_forward: Int = Field(8192, ge=1)
    max_tokens_per_forward: Int = Field(16384, ge=1)

    def traces(self) -> list[Trace]:
        made = {
            "monkeys": lambda: monkeys(self.prompts, self.samples),
            "mix": lambda: mix(self.requests),
            "mix_loose": lambda: mix_loose(self.requests),
        }
        return [make() for name, make in made.items() if self.trace in (name, "all")]

    def shape(self) -> WorkerLimits:
        return worker_shape(
            self.page_size,
            self.kv_cache_num_tokens // self.page_size,
            self.max_seqs_per_forward,
            self.max_tokens_per_forward,
        )


def worker_shape(page_size: int, pages: int, slots: int, tokens_per_step: int) -> WorkerLimits:
    return WorkerLimits(
        page_size, pages, slots, tokens_per_step, LONGEST_PROMPT + LONGEST_ANSWER, VOCAB_SIZE, hydragen=True
    )


class StaticAdmission(AdmissionControl):
    """An admission in order of arrival. A sequence reserves pages for its prompt and its whole limit."""

    def select(self, candidates: Sequences, classes: np.ndarray) -> np.ndarray:
        return np.arange(self.fitting(candidates, classes))

    def fits(self, candidates: Sequences, classes: np.ndarray) -> bool:
        forecast = forecast_running(self._state, self._set_aside(self._running), horizon=1)
        return bool(forecast.with_candidates(self._set_aside(candidates))[0] <= self._state.pool.pages.size)

    def _set_aside(self, sequences: Sequences) -> Sequences:
        """Return ``sequences`` with the pages that they need at their limits."""
        return sequences._replace(pages=-(-(sequences.limit - 1) // self._state.pool.shape.page_size))


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a trace under one policy. The arrays have an entry for each step."""

    pages: np.ndarray  # in use
    running: np.ndarray  # sequences in the batch
    computed: np.ndarray  # tokens, including prompts and wasted or recomputed tokens
    prefilled: np.ndarray  # tokens of prompts among them
    finished: np.ndarray  # samples that had finished before the step
    generated: np.ndarray  # tokens of finished and running samples before the step
    tokens: int  # of all answers
    preemptions: int
    recomputed: int  # tokens
    wasted: int  # tokens, computed behind an end that the scheduler had not received yet
    seconds: float  # duration of the simulation

    @property
    def rate(self) -> float:
        """Tokens of answers per step."""
        return self.tokens / len(self.pages)

    @property
    def recomputed_share(self) -> float:
        return self.recomputed / int(self.computed.sum())

    @property
    def steady_rate(self) -> float:
        """Tokens of answers per step, until most samples have finished."""
        steady = int(np.count_nonzero(self.finished < STEADY * self.finished[-1]))
        return int(self.generated[steady]) / steady

    def figures(self) -> dict[str, int | float]:
        return {
            "steps": len(self.pages),
            "tokens_per_step": self.rate,
            "steady_tokens_per_step": self.steady_rate,
            "mean_batch": float(self.running.mean()),
            "peak_pages": int(self.pages.max()),
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed,
            "recomputed_share": self.recomputed_share,
            "wasted_tokens": self.wasted,
            "prefilled_tokens": int(self.prefilled.sum()),
            "seconds": self.seconds,
        }


def simulate(
    trace: Trace, shape: WorkerLimits, mode: AdmissionMode, admission: type[AdmissionControl] = AdmissionControl
) -> Outcome:
    """Run a trace to its end."""
    started, rows = time.perf_counter(), []
    simulation = Simulation(trace, shape, mode, admission)
    pool, counters = simulation.core.state.pool.pages, simulation.core.state.queue.counters
    while (plan := simulation.step()) is not None:
        finished = np.count_nonzero(simulation.finished)
        step = (pool.in_use, plan.sequences, plan.tokens, plan.prefill_tokens, finished, counters.generated_tokens)
        rows.append(step)
    return Outcome(
        *np.array(rows).T,
        tokens=int(trace.lengths.sum()),
        preemptions=counters.preemptions,
        recomputed=counters.recomputed_tokens,
        wasted=counters.wasted_tokens,
        seconds=time.perf_counter() - started,
    )


POLICIES: dict[str, Callable[[Trace, WorkerLimits], Outcome]] = {
    "static": lambda trace, shape: simulate(trace, shape, AdmissionMode.GUARANTEED, StaticAdmission),
    "guaranteed": lambda trace, shape: simulate(trace, shape, AdmissionMode.GUARANTEED),
    "predicted": lambda trace, shape: simulate(trace, shape, AdmissionMode.PREDICTED),
    "oracle": lambda trace, shape: simulate(trace.with_known_lengths(), shape, AdmissionMode.GUARANTEED),
}


@dataclass(frozen=True)
class SharedPrompt:
    """The cost of many samples of a prompt, and of a second request that begins with it, while all of them run."""

    samples: int
    prompt_tokens: int
    prompt_pages: int  # pages in use that belong to no single sequence
    prefilled_tokens: int  # by the samples
    prefilled_again: int  # by the second request
    second_prompt_tokens: int


def share_prompt(samples: int) -> SharedPrompt:
    """Start the samples and the second request, and measure when all of them run."""
    trace, page_size = one_prompt_twice(samples), 16
    first, second = trace.requests
    shape = worker_shape(page_size, 64 * (samples + 1), samples + 1, 4096 + samples)
    simulation, prefilled = Simulation(trace, shape, AdmissionMode.GUARANTEED), [0, 0]
    slots = simulation.core.state.pool.slots
    while slots.running <= samples:
        for entry in simulation.step().admissions:
            prefilled[entry.sampling.parameters.seed] += len(entry.token_ids) - entry.cached_tokens
    whole = (len(first.tokens) - 1) // page_size
    own = int(slots.page_count[slots.active].sum()) - whole * slots.running
    pages = simulation.core.state.pool.pages.in_use - own
    return SharedPrompt(samples, len(first.tokens), pages, *prefilled, len(second.tokens))


def main() -> None:
    """Run every policy on every trace, print a table, and a JSON object as the last line."""
    config, console = from_command_line(BenchConfig), Console()
    outcomes: dict[str, dict[str, Outcome]] = {}
    for trace in config.traces():
        outcomes[trace.name] = {name: run(trace, config.shape()) for name, run in POLICIES.items()}
        console.print(tabulate(trace, outcomes[trace.name]), "")
    shared = share_prompt(config.samples)
    console.print(
        f"{shared.samples} samples of a prompt of {shared.prompt_tokens} tokens: {shared.prompt_pages} pages and"
        f" {shared.prefilled_tokens} computed tokens for their prompts; a second request with this prompt and"
        f" {shared.second_prompt_tokens - shared.prompt_tokens} tokens more computed {shared.prefilled_again}"
    )
    if config.plot:
        plot(outcomes, config.kv_cache_num_tokens // config.page_size, Path(config.plot))
        console.print(f"Curves: {config.plot}")
    figures: dict[str, Any] = {
        name: {policy: outcome.figures() for policy, outcome in found.items()} for name, found in outcomes.items()
    }
    report(rounded(headlines(outcomes) | figures | {"shared_prompt": asdict(shared)}))


def headlines(outcomes: dict[str, dict[str, Outcome]]) -> dict[str, float]:
    chosen = outcomes.get("mix") or next(iter(outcomes.values()))
    return {
        "guaranteed_over_static": chosen["guaranteed"].rate / chosen["static"].rate,
        "predicted_over_oracle": min(found["predicted"].rate / found["oracle"].rate for found in outcomes.values()),
        "steady_predicted_over_oracle": min(
            found["predicted"].steady_rate / found["oracle"].steady_rate for found in outcomes.values()
        ),
        "recomputed_share": max(found["predicted"].recomputed_share for found in outcomes.values()),
    }


def rounded(figures: Any) -> Any:
    """Round floats at any depth to four decimal places."""
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return round(figures, 4) if isinstance(figures, float) else figures


def tabulate(trace: Trace, outcomes: dict[str, Outcome]) -> Table:
    lengths = trace.lengths
    title = f"{trace.name}: {len(lengths)} samples, {lengths.mean():.0f} tokens on average"
    table = Table(title=title, box=None, title_justify="left", padding=(0, 2, 0, 0))
    table.add_column("policy")
    for column in ("steps", "tok/step", "of oracle", "steady", "batch", "preempted", "recomputed"):
        table.add_column(column, justify="right")
    for policy, outcome in outcomes.items():
        found = outcome.figures()
        table.add_row(
            policy,
            str(found["steps"]),
            f"{found['tokens_per_step']:.0f}",
            f"{outcome.rate / outcomes['oracle'].rate:.1%}",
            f"{found['steady_tokens_per_step']:.0f}",
            f"{found['mean_batch']:.0f}",
            str(found["preemptions"]),
            f"{found['recomputed_share']:.2%}",
        )
    return table


def plot(outcomes: dict[str, dict[str, Outcome]], pages: int, target: Path) -> None:
    """Write pages in use and running sequences over the steps as a PNG, a row for each trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(outcomes), 2, figsize=(11, 3.2 * len(outcomes)), squeeze=False, layout="constrained"
    )
    for row, (name, found) in zip(grid, outcomes.items(), strict=True):
        for policy, outcome in found.items():
            row[0].plot(outcome.pages, label=policy, linewidth=1)
            row[1].plot(outcome.running, label=policy, linewidth=1)
        row[0].axhline(pages, color="black", linestyle=":", linewidth=1, label="pool")
        row[0].set(title=name, xlabel="step", ylabel="pages in use")
        row[1].set(title=name, xlabel="step", ylabel="running sequences")
        for axes in row:
            axes.grid(alpha=0.3)
            axes.legend()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
