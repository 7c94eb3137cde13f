"""Run random batches on a worker's runner: ``python -m bench.fuzz_worker [batches=10000] [seed=0]
[worker_flags='model=... torch_compile=T ...'] [in_flight=3] [resets=5] [growth_mib=64]``.

All plans are valid, and cover everything that a scheduler can send: any number of rows, chunks up to the limit of a
step, admissions with shared and copied pages, groups of any shape, every sampling setting, plans without the parts that
did not change, and takeovers with steps in flight. The exit status is 1 if a plan fails or has a wrong result, if a
kernel is compiled after the boot, or if the memory that the boot reserved grows by more than ``growth_mib``. The last
line is one JSON object.
"""

import sys
import time
import traceback
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from bench.local_worker import MOST_IN_FLIGHT, Feeder, boot_worker, prepare, read_worker_flags
from bench.random_plans import Expected, RandomPlans
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Int
from services.common.plan.types import WorkerLimits
from services.worker.step.output import StepOutput

_MIB = 2**20
_LOOK_EVERY = 64  # batches
_MOST_PROBLEMS = 20


class FuzzConfig(Config):
    """The flags."""

    batches: Int = Field(10000, ge=1)
    seed: Int = Field(0, ge=0)
    worker_flags: str = Field("", description="flags of the worker, quoted as in a shell")
    in_flight: Int = Field(3, ge=1, le=MOST_IN_FLIGHT)
    resets: Int = Field(5, ge=0, description="times that a new scheduler takes the worker over")
    growth_mib: Int = Field(64, ge=0, description="allowed growth of reserved memory")


class Answers:
    """A checker of results. The feeder's thread calls it in the order of the plans."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.problems: list[str] = []
        self.count = self.tokens = 0
        self._limits = limits

    def check(self, batch: int, expected: Expected, output: StepOutput) -> None:
        """Check the result of plan number ``batch``, counted over all resets."""
        self.count += 1
        self.tokens += len(expected.slots)
        found = self._wrong(expected, output)
        if found and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"batch {batch}, step {expected.step}: {found}")

    def _wrong(self, expected: Expected, output: StepOutput) -> str:
        sampled, vocab = output.sampled, self._limits.vocab_size
        if output.step != expected.step:
            return f"answered as step {output.step}"
        if not np.array_equal(sampled.slots, expected.slots):
            return f"{len(sampled.slots)} slots sampled, expected {len(expected.slots)}, or in another order"
        if not sampled.finite.all():
            return f"slot {sampled.slots[~sampled.finite][0]}: logits that are not numbers"
        if len(sampled.token_ids) and not 0 <= sampled.token_ids.min() <= sampled.token_ids.max() < vocab:
            return "a token that is none"
        if expected.logprobs.any():
            values = sampled.logprobs
            if values is None or len(values) != len(expected.slots) or np.isnan(values[expected.logprobs]).any():
                return "a log-probability is missing"
            if not np.isnan(values[~expected.logprobs]).all() or values[expected.logprobs].max() > 1e-3:
                return "a log-probability that was not asked for, or above 0"
        if expected.top_logprobs.any():
            if sampled.top is None or not np.array_equal(sampled.top.counts, expected.top_logprobs):
                return "not as many top log-probabilities as asked for"
            ids = sampled.top.token_ids
            if len(ids) != expected.top_logprobs.sum() or not 0 <= ids.min() <= ids.max() < vocab:
                return "top tokens that are none"
            inside = np.ones(len(ids), bool)
            inside[np.cumsum(expected.top_logprobs[expected.top_logprobs > 0])[:-1]] = False
            if (np.diff(sampled.top.logprobs) > 1e-6)[inside[1:]].any():
                return "top log-probabilities that are not in order"
        return ""


class Memory:
    """A record of the device's memory since the boot."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._booted = self._cuda.max_memory_reserved()
        self.least_free = self._cuda.mem_get_info()[0]
        self._free_at_boot = self.least_free

    def look(self) -> None:
        """Update the smallest amount of free memory."""
        self.least_free = min(self.least_free, self._cuda.mem_get_info()[0])

    def figures(self) -> dict[str, float]:
        """Return figures in MiB. ``growth`` is the memory beyond the maximum that the boot reserved."""
        self.look()
        return {
            "reserved_at_boot_mib": round(self._booted / _MIB),
            "growth_mib": round(max(0, self._cuda.max_memory_reserved() - self._booted) / _MIB, 1),
            "free_at_boot_mib": round(self._free_at_boot / _MIB),
            "least_free_mib": round(self.least_free / _MIB),
        }


def main() -> None:
    """Run the batches, and print all problems and a JSON object as the last line."""
    config = from_command_line(FuzzConfig)
    flags = read_worker_flags(config.worker_flags)
    prepare(flags)
    worker = boot_worker(flags)
    from services.worker.boot.compilation import kernel_compilations, recompilations  # loads torch

    memory = Memory() if worker.on_cuda else None
    runner, plans = worker.runner, RandomPlans(worker.runner.limits, config.seed)
    answers = Answers(runner.limits)
    figures: dict[str, Any] = {"model": worker.booted.model, "device": worker.booted.device, "seed": config.seed}
    rows = tokens = largest = 0
    generating = 0.0
    random = np.random.default_rng(config.seed)
    most_resets = min(config.resets, config.batches - 1)
    resets = set((1 + random.permutation(config.batches - 1)[:most_resets]).tolist())
    compiled_at: list[int] = []
    feeder = Feeder(runner, config.in_flight)
    runner.reset()
    started = time.perf_counter()
    number = 0
    try:
        for number in range(config.batches):
            if number in resets:
                runner.reset()
                plans.reset()
            generated = time.perf_counter()
            plan, expected = plans.next()
            generating += time.perf_counter() - generated
            before = kernel_compilations()
            feeder.put(plan, 0, partial(answers.check, number, expected))
            if kernel_compilations() > before:
                compiled_at.append(number)
            size = plans.tokens_in_batch
            rows, tokens, largest = rows + plans.rows_in_batch, tokens + size, max(largest, size)
            if memory is not None and number % _LOOK_EVERY == 0:
                memory.look()
        feeder.drain()
        feeder.close()
    except Exception as error:
        traceback.print_exc()
        answers.problems.append(f"batch {number} or one in flight with it: {type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    problems = answers.problems
    if recompilations():
        problems.append(f"{recompilations()} recompilations of the model after the boot")
    if kernel_compilations():
        problems.append(
            f"{kernel_compilations()} Triton kernels compiled after the boot, at batches {compiled_at[:20]}"
        )
    figures |= {
        "batches": answers.count,
        "seconds": round(seconds, 2),
        "batches_per_second": round(answers.count / seconds, 1),
        "generator_ms": round(1000 * generating / max(1, answers.count), 3),
        "rows": rows,
        "tokens": tokens,
        "largest_batch_tokens": largest,
        "sampled": answers.tokens,
        "recompilations": recompilations(),
        "kernel_compilations": kernel_compilations(),
    }
    if memory is not None:
        figures |= memory.figures()
        if figures["growth_mib"] > config.growth_mib:
            problems.append(f"reserved memory grew by {figures['growth_mib']} MiB over what the boot had reserved")
    for problem in problems:
        print(f"WRONG {problem}")
    print(
        f"{answers.count} batches in {seconds:.1f} s, {figures['batches_per_second']} a second; {tokens} tokens,"
        f" {largest} in the largest; {len(problems)} problems"
    )
    report(figures | {"problems": problems})
    sys.stdout.flush()
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
