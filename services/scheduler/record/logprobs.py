"""Whether an answer has the log-probabilities that its rows asked for, and no others."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from services.common.packed import read_fixed32, read_float
from services.scheduler.record.violation import expect, expect_each
from tokasaurus.worker.v1 import plan_pb2

NOT_ASKED = -1


class ScoresDue(NamedTuple):
    """Prompt tokens of one slot whose log-probabilities a step has to give."""

    start: int  # place in the sequence
    stop: int
    top: int  # of the most likely tokens for each


def check_logprobs(
    result: plan_pb2.StepResult,
    slots: np.ndarray,
    asked: np.ndarray,
    failed: np.ndarray,
    vocab_size: int,
    processed: np.ndarray,
) -> None:
    """Check the log-probabilities of ``result``, whose rows are ``slots [rows]``. Raises ``ResultViolation``.

    ``asked [rows]`` int64 is how many top log-probabilities each row wants; ``NOT_ASKED`` = not even its token's own.
    ``failed`` is the same of the rows that failed: arrays that only they asked for may be there. ``processed [rows]``
    bool are rows that may have fewer, since fewer tokens can be drawn.
    """
    rows = len(slots)
    logprobs, wanted = read_float(result.logprobs), asked != NOT_ASKED
    if wanted.any() or len(logprobs):
        expect(wanted.any() or (failed != NOT_ASKED).any(), f"{len(logprobs)} logprobs, and no row asked for any")
        expect(len(logprobs) == rows, f"{len(logprobs)} logprobs for {rows} slots")
        given = ~np.isnan(logprobs)
        expect_each(given | ~wanted, "no logprob, and its row asked for one", slots=slots)
        expect_each(wanted | ~given, "a logprob, and its row asked for none", slots=slots)
    counts, due = read_fixed32(result.top_counts), np.maximum(asked, 0)
    if due.any() or len(counts):
        expect(due.any() or (failed > 0).any(), f"{len(counts)} top_counts, and no row asked for top logprobs")
        expect(len(counts) == rows, f"{len(counts)} top_counts for {rows} slots")
        fewer = processed & (counts < due) & (counts > 0)
        expect_each((counts == due) | fewer, "another number of top logprobs than its row asked for", slots=slots)
    ids, values = read_fixed32(result.top_token_ids), read_float(result.top_logprobs)
    total = int(counts.sum())
    expect(len(ids) == len(values) == total, f"{len(ids)} top_token_ids and {len(values)} top_logprobs of {total} due")
    expect((ids < vocab_size).all(), "a top token outside the vocabulary")
    expect(not np.isnan(values).any(), "a top logprob that is not a number")


def check_scores(result: plan_pb2.StepResult, due: Mapping[int, ScoresDue], vocab_size: int) -> None:
    """``due`` by slot: each comes once, whole, in parts that follow each other. Raises ``ResultViolation``."""
    told = {slot: wanted.start for slot, wanted in due.items()}
    for scores in result.prompts:
        slot, count = scores.slot, len(scores.logprobs)
        expect(slot in due and scores.start == told[slot], f"scores of the token at {scores.start}", slot=slot)
        told[slot] += count
        listed = count * due[slot].top
        lengths = len(scores.ranks), len(scores.top_token_ids), len(scores.top_logprobs)
        expect(lengths == (count, listed, listed), f"scores of {count} tokens with arrays of {lengths}", slot=slot)
        values = np.concatenate((read_float(scores.logprobs), read_float(scores.top_logprobs)))
        expect(not np.isnan(values).any(), "a score that is not a number", slot=slot)
        expect((read_fixed32(scores.top_token_ids) < vocab_size).all(), "a top token outside the vocabulary", slot=slot)
    for slot, wanted in due.items():
        expect(told[slot] == wanted.stop, f"scores up to {told[slot]}, due were {wanted.stop}", slot=slot)
