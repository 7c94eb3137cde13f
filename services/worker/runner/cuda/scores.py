"""The prompt tokens that a step on a GPU scores, and their log-probabilities."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.common.plan.result import ScoredTokens
from services.common.plan.top_logprobs import TopLogprobs
from services.common.plan.types import Batch
from services.worker.runner.cuda.transfers import to_host
from services.worker.sampling.prompt_logprobs import RowScores
from services.worker.step.slots import SlotTable


class ScoredRun(NamedTuple):
    """Consecutive prompt tokens of one sequence."""

    slot: int
    start: int  # position in the sequence of the first token
    count: int  # type: ignore[assignment]  # replaces a method of tuples that is not used
    top: int  # most likely tokens to list for each token


@dataclass(frozen=True)
class PromptRuns:
    """The scored tokens of a step, in batch order. On the host."""

    runs: tuple[ScoredRun, ...]
    tokens: np.ndarray  # [n] int32, index among the step's tokens (see ``StepArrays``) of the token before each of them
    token_ids: np.ndarray  # [n] int64, the scored tokens

    @property
    def widest(self) -> int:
        """The largest ``top`` of the runs."""
        return max(run.top for run in self.runs)


def find_runs(batch: Batch, slots: SlotTable) -> PromptRuns | None:
    """Return the prompt tokens that a valid ``batch`` scores, or None if there are none.

    The hidden states that score tokens are not sampled from, because the next token is known.
    """
    rows, counts = batch.slots, batch.token_counts
    scored = np.flatnonzero(slots.prompt_logprobs[rows] >= 0)
    if not len(scored):
        return None
    begins, last = slots.computed[rows], slots.prompt_tokens[rows] - 1
    skipped = np.maximum(slots.prompt_start[rows] - 1 - begins, 0)  # leading tokens of the row that are not scored
    scored = scored[(skipped[scored] < counts[scored]) & ((begins + skipped)[scored] < last[scored])]
    if not len(scored):
        return None
    order = np.argsort(counts != 1, kind="stable")
    starts = np.empty_like(counts)
    starts[order] = np.cumsum(counts[order]) - counts[order]
    runs, tokens, token_ids = [], [], []
    for row in scored.tolist():
        slot, skip = int(rows[row]), int(skipped[row])
        begin, start = int(begins[row]) + skip, int(starts[row]) + skip
        count = min(int(counts[row]) - skip, int(last[row]) - begin)
        runs.append(ScoredRun(slot, begin + 1, count, int(slots.prompt_logprobs[slot])))
        tokens.append(np.arange(start, start + count, dtype=np.int32))
        token_ids.append(slots.prompts[slot][begin + 1 : begin + 1 + count])
    return PromptRuns(tuple(runs), np.concatenate(tokens), np.concatenate(token_ids))


class StepScores:
    """The scores of a launched step. Made by the compute thread, read by the answering thread."""

    def __init__(self, runs: tuple[ScoredRun, ...], found: RowScores) -> None:
        """``found``: the scores of all runs, concatenated."""
        self._runs, self._found = runs, found

    def __len__(self) -> int:
        return len(self._found.logprobs)

    def to_host(self) -> "StepScores":
        """Return a copy on the host. It is complete when the current stream reaches this point."""
        return StepScores(self._runs, RowScores(*map(to_host, self._found)))

    def collect(self, failed: np.ndarray) -> tuple[ScoredTokens, ...]:
        """Return the scores, which must be on the host. Set ``failed [max_slots]`` bool if scores are not numbers."""
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
