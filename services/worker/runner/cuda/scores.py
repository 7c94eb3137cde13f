"""Prompt tokens that a step on a GPU scores: which they are, and what comes of it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.common.plan.result import ScoredTokens
from services.common.plan.top_logprobs import TopLogprobs
from services.common.plan.types import Batch
from services.worker.runner.cuda.download import to_host
from services.worker.sampling.prompt_logprobs import RowScores
from services.worker.step.slots import SlotTable


class Run(NamedTuple):
    """Consecutive tokens of one sequence."""

    slot: int
    start: int  # place in the sequence of the first of them
    count: int  # type: ignore[assignment]  # in the place of a tuple's method, which nobody calls
    top: int  # most likely tokens that were asked for beside each


@dataclass(frozen=True)
class PromptRuns:
    """Of a step, in batch order. On the host."""

    runs: tuple[Run, ...]
    tokens: np.ndarray  # [n] int32, index among the step's tokens (see ``StepArrays``) of the one before each scored
    token_ids: np.ndarray  # [n] int64, those that are scored

    @property
    def widest(self) -> int:
        """The most likely tokens that any of them asked for."""
        return max(run.top for run in self.runs)


def find_runs(batch: Batch, slots: SlotTable) -> PromptRuns | None:
    """What ``batch``, which was checked, computes of prompts whose log-probabilities were asked for; None = nothing.

    No such row samples from what it scores with: its next token is known.
    """
    rows, counts = batch.slots, batch.token_counts
    asked = np.flatnonzero(slots.prompt_logprobs[rows] >= 0)
    if not len(asked):
        return None
    begins, last = slots.computed[rows], slots.prompt_tokens[rows] - 1
    skipped = np.maximum(slots.prompt_start[rows] - 1 - begins, 0)  # the first tokens of the row, before the start
    asked = asked[(skipped[asked] < counts[asked]) & ((begins + skipped)[asked] < last[asked])]
    if not len(asked):
        return None
    order = np.argsort(counts != 1, kind="stable")
    starts = np.empty_like(counts)
    starts[order] = np.cumsum(counts[order]) - counts[order]
    runs, tokens, token_ids = [], [], []
    for row in asked.tolist():
        slot, skip = int(rows[row]), int(skipped[row])
        begin, start = int(begins[row]) + skip, int(starts[row]) + skip
        count = min(int(counts[row]) - skip, int(last[row]) - begin)
        runs.append(Run(slot, begin + 1, count, int(slots.prompt_logprobs[slot])))
        tokens.append(np.arange(start, start + count, dtype=np.int32))
        token_ids.append(slots.prompts[slot][begin + 1 : begin + 1 + count])
    return PromptRuns(tuple(runs), np.concatenate(tokens), np.concatenate(token_ids))


class StepScores:
    """Of a step that was launched. Made by the compute thread, read by the one that takes results."""

    def __init__(self, runs: tuple[Run, ...], found: RowScores) -> None:
        """``found``: of all runs, one after the other."""
        self._runs, self._found = runs, found

    def __len__(self) -> int:
        return len(self._found.logprobs)

    def to_host(self) -> "StepScores":
        """Copies, complete when the current stream has come so far."""
        return StepScores(self._runs, RowScores(*map(to_host, self._found)))

    def collect(self, failed: np.ndarray) -> tuple[ScoredTokens, ...]:
        """Of what is on the host. ``failed [max_slots]`` bool: becomes true for slots whose logits were not numbers."""
        logprobs, ranks, top_token_ids, top_logprobs = (each.numpy() for each in self._found)
        scored, begin = [], 0
        for run in self._runs:
            inside = slice(begin, begin + run.count)
            begin = inside.stop
            failed[run.slot] |= not np.isfinite(logprobs[inside]).all()
            top = inside, slice(run.top)
            scored.append(
                ScoredTokens(
                    run.slot,
                    run.start,
                    logprobs[inside],
                    ranks[inside],
                    TopLogprobs.of(top_token_ids[top], top_logprobs[top]),
                )
            )
        return tuple(scored)
