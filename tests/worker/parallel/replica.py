"""A replica of several workers, driven as if it were one runner; and one worker alone, to compare with."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.server import free_port
from services.common.plan.types import Plan, WorkerLimits
from services.worker.boot.common import boot
from services.worker.described.ranks import ALONE
from services.worker.layers import matmul_cpu
from services.worker.runner.runner import StepRunner
from services.worker.step.output import StepOutput
from tests.worker.parallel import jobs
from tests.worker.parallel.pool import RankPool


class Replica:
    """Has what ``Driver`` needs of a runner."""

    def __init__(
        self, pool: RankPool, tp_size: int, pp_size: int, directory: Path, flags: dict, fewest_sharded: int
    ) -> None:
        self._pool, self._grid = pool, (tp_size, pp_size)
        self.parts = 1  # that batches are cut into
        everyone = pool.run(jobs.start, *self._grid, free_port(), directory, flags, fewest_sharded)
        assert all(limits == everyone[0] for limits in everyone)
        self.limits: WorkerLimits = everyone[0]

    def run(self, plan: Plan) -> StepOutput:
        if self.parts > 1 and plan.batch is not None:
            plan = replace(plan, micro_batch_rows=cut(len(plan.batch.slots), self.parts))
        return self.run_all([plan])[0][0]

    def run_all(self, plans: Sequence[Plan]) -> list[jobs.Step]:
        """What the rank that reports gave, once it is shown that the others fit to it."""
        tp_size, pp_size = self._grid
        everyone = self._pool.run(jobs.run, *self._grid, list(plans))
        first = (pp_size - 1) * tp_size
        for index, steps in enumerate(everyone):
            assert [output.step for output, _ in steps] == [plan.step for plan in plans]
            if index != first:
                assert all(not len(output.sampled.slots) and not output.scored for output, _ in steps)
                assert all(output.routed is None for output, _ in steps)
        for others in everyone[first + 1 :]:
            for (_, mine), (_, theirs) in zip(everyone[first], others, strict=True):
                assert (mine is None) == (theirs is None)
                # So they sample the same.
                assert mine is None or torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        return everyone[first]

    def call(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Have every rank do ``job``. Return what each returned."""
        return self._pool.run(job, *self._grid, *arguments)

    def reset(self) -> None:
        self._pool.run(jobs.reset, *self._grid)

    def close(self) -> None:
        self._pool.run(jobs.stop, *self._grid)


def cut(rows: int, parts: int) -> tuple[int, ...]:
    """Rows of each part: as equal as can be."""
    return tuple(rows // parts + (part < rows % parts) for part in range(parts))


@cache
def alone(directory: Path) -> StepRunner:
    """The model in this process, kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_cpu, "available", lambda: False)  # without the decoder that takes seconds to compile
        return boot(jobs.make_config(ALONE, 10510, directory, {})).runner


def same(expected: Sequence[jobs.Step], found: Sequence[jobs.Step]) -> None:
    """Fails unless tokens are equal, and logits and log-probabilities up to rounding."""
    for (wanted, wanted_logits), (given, given_logits) in zip(expected, found, strict=True):
        wanted, given, step = wanted.sampled, given.sampled, f"step {wanted.step}"
        assert given.slots.tolist() == wanted.slots.tolist(), step
        assert given.finite.tolist() == wanted.finite.tolist(), step
        if wanted_logits is not None:
            torch.testing.assert_close(given_logits, wanted_logits, atol=1e-4, rtol=0, msg=step)
        assert given.token_ids.tolist() == wanted.token_ids.tolist(), step
        missing = given.logprobs is None, given.top is None
        assert missing == (wanted.logprobs is None, wanted.top is None), step
        if wanted.logprobs is not None:
            np.testing.assert_allclose(given.logprobs, wanted.logprobs, atol=1e-4, equal_nan=True, err_msg=step)
        if wanted.top is not None:
            np.testing.assert_allclose(given.top.logprobs, wanted.top.logprobs, atol=1e-4, err_msg=step)
            assert given.top.counts.tolist() == wanted.top.counts.tolist(), step
