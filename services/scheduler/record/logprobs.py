"""Check that a result has the log-probabilities that its rows asked for, and no others.

``services.common.plan.result_rules`` has checked that its arrays fit each other.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from services.common.plan.result import ScoredTokens, StepResult
from services.scheduler.record.violation import expect, expect_each

NOT_ASKED = -1


class ScoresDue(NamedTuple):
    """Prompt tokens of one slot whose log-probabilities a step has to give."""

    start: int  # position in the sequence
    stop: int
    top: int  # of the most likely tokens for each


def check_logprobs(result: StepResult, asked: np.ndarray, failed: np.ndarray, processed: np.ndarray) -> None:
    """Check the log-probabilities of the rows of ``result``. Raises ``Violation``.

    ``asked [rows]`` int64 is the number of top log-probabilities that each row asked for; ``NOT_ASKED`` = not even its
    token's own. ``failed`` is the same for the rows that failed: arrays that only they asked for may be there.
    ``processed [rows]`` bool are rows that may have fewer, since fewer tokens can be drawn.
    """
    slots, logprobs, wanted = result.slots, result.logprobs, asked != NOT_ASKED
    rows = len(slots)
    if wanted.any() or len(logprobs):
        expect(wanted.any() or (failed != NOT_ASKED).any(), f"{len(logprobs)} logprobs, and no row asked for any")
        expect(len(logprobs) == rows, f"{len(logprobs)} logprobs for {rows} slots")
        given = ~np.isnan(logprobs)
        expect_each(given | ~wanted, "no logprob, and its row asked for one", slots=slots)
        expect_each(wanted | ~given, "a logprob, and its row asked for none", slots=slots)
    due = np.maximum(asked, 0)
    if result.top is None:
        expect(not due.any(), f"0 top_counts for {rows} slots")
        return
    counts = result.top.counts
    expect(due.any() or (failed > 0).any(), f"{len(counts)} top_counts, and no row asked for top logprobs")
    fewer = processed & (counts < due) & (counts > 0)
    expect_each((counts == due) | fewer, "another number of top logprobs than its row asked for", slots=slots)
    expect(not np.isnan(result.top.logprobs).any(), "a top logprob that is not a number")


def check_scores(scored: Sequence[ScoredTokens], due: Mapping[int, ScoresDue]) -> None:
    """Check that each of ``due``, by slot, comes once, whole, in parts that follow each other.

    Raises ``Violation``.
    """
    given = {slot: wanted.start for slot, wanted in due.items()}
    for part in scored:
        slot, count = part.slot, len(part.logprobs)
        expect(slot in due and part.start == given[slot], f"scores of the token at {part.start}", slot=slot)
        given[slot] += count
        expect(
            bool((part.top.counts == due[slot].top).all()),
            f"scores of {count} tokens with {len(part.top.token_ids)} top tokens",
            slot=slot,
        )
        values = np.concatenate((part.logprobs, part.top.logprobs))
        expect(not np.isnan(values).any(), "a score that is not a number", slot=slot)
    for slot, wanted in due.items():
        expect(given[slot] == wanted.stop, f"scores up to {given[slot]}, due were {wanted.stop}", slot=slot)
