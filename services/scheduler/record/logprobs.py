"""Check that a result has the log-probabilities that its rows request, and no others."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from services.common.packed import read_fixed32, read_float
from services.scheduler.record.violation import expect, expect_each
from tokasaurus.worker.v1 import plan_pb2

NOT_ASKED = -1


class ScoresDue(NamedTuple):
    """Prompt tokens of a slot whose log-probabilities a result must have."""

    start: int  # position in the sequence
    stop: int
    top: int  # number of top log-probabilities for each


def check_logprobs(
    result: plan_pb2.StepResult,
    slots: np.ndarray,
    asked: np.ndarray,
    failed: np.ndarray,
    vocab_size: int,
    processed: np.ndarray,
) -> None:
    """Check the log-probabilities of ``result``, whose rows are ``slots [rows]``. Raises ``ResultViolation``.

    ``asked [rows]`` int64 is the number of top log-probabilities that each row requests. ``NOT_ASKED`` means that it
    does not request the log-probability of its token either. ``failed`` is the same for the rows that failed: the
    result may have arrays that only they request. ``processed [rows]`` bool are rows that may have fewer, as fewer
    tokens can be drawn.
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
    """Check that ``result`` has the prompt tokens ``due`` of each slot once, in order. Raises ``ResultViolation``."""
    received = {slot: wanted.start for slot, wanted in due.items()}
    for scores in result.prompts:
        slot, count = scores.slot, len(scores.logprobs)
        expect(slot in due and scores.start == received[slot], f"scores of the token at {scores.start}", slot=slot)
        received[slot] += count
        listed = count * due[slot].top
        lengths = len(scores.ranks), len(scores.top_token_ids), len(scores.top_logprobs)
        expect(lengths == (count, listed, listed), f"scores of {count} tokens with arrays of {lengths}", slot=slot)
        values = np.concatenate((read_float(scores.logprobs), read_float(scores.top_logprobs)))
        expect(not np.isnan(values).any(), "a score that is not a number", slot=slot)
        expect((read_fixed32(scores.top_token_ids) < vocab_size).all(), "a top token outside the vocabulary", slot=slot)
    for slot, wanted in due.items():
        expect(received[slot] == wanted.stop, f"scores up to {received[slot]}, due were {wanted.stop}", slot=slot)
