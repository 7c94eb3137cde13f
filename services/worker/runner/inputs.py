"""The inputs of a forward pass on a CPU, made from a batch and the state of the slots, and split into shards."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from services.common.plan.types import Batch
from services.worker.attention.base import AttentionBatch
from services.worker.sampling.prompt_logprobs import ScoreSpan
from services.worker.step.slots import SlotTable

# Tokens of a shard from which on reading all weights takes little of its time.
_LARGE_SHARD = 16


@dataclass(frozen=True)
class Shard:
    """Consecutive tokens of the step that one thread computes, or samples if threads share the operators.

    A row may continue in the next shard.
    """

    start: int  # index of the first token among the step's tokens
    end: int
    attention: AttentionBatch
    sample_tokens: np.ndarray  # [samples] int64, indices within the shard of the tokens whose logits are sampled
    sample_slots: np.ndarray  # beside sample_tokens
    sample_positions: np.ndarray  # beside sample_tokens: position in the sequence of the sampled token
    scores: tuple[ScoreSpan, ...] = ()


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step. Tokens are in batch order. Made and used by the compute thread."""

    positions: np.ndarray  # [tokens] int64
    known_tokens: np.ndarray | None  # [tokens] int64, 0 where the input is the slot's last token; None = everywhere
    last_of: np.ndarray  # [n] int64, indices of the tokens whose input is the slot's last token
    last_slots: np.ndarray  # beside last_of
    shards: tuple[Shard, ...]
    independent: bool  # no row reads keys and values that another row stores in this step: all rows decode


def build(batch: Batch, slots: SlotTable, threads: int) -> StepInputs:
    """Return the inputs of a valid ``batch`` with at least one row, in at most ``threads`` shards."""
    rows, counts = batch.slots, batch.token_counts
    begins = slots.computed[rows]
    decoding = begins >= slots.given[rows]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    if total == len(rows):
        token_slots, positions = rows, begins
    else:
        token_slots = np.repeat(rows, counts)
        positions = np.arange(total) - np.repeat(ends - counts - begins, counts)
    if decoding.all():
        known_tokens, last_of, last_slots = None, np.arange(total), rows
    else:
        known_tokens = np.zeros(total, np.int64)
        for row in np.flatnonzero(~decoding).tolist():
            begin, end, count = int(begins[row]), int(ends[row]), int(counts[row])
            known_tokens[end - count : end] = slots.prompts[rows[row]][begin : begin + count]
        last_of, last_slots = ends[decoding] - 1, rows[decoding]
    samples = ends[begins + counts == slots.known[rows]] - 1
    pieces = min(threads, _most_shards(total))
    cuts = [total * index // pieces for index in range(pieces + 1)]
    shards = tuple(
        _cut(start, end, token_slots, positions, ends - counts, ends, samples, rows, slots.page_table)
        for start, end in pairwise(cuts)
    )
    if known_tokens is not None and (asked := np.flatnonzero(~decoding & (slots.prompt_logprobs[rows] >= 0))).size:
        runs = [(int(rows[row]), int(begins[row]), int(ends[row] - counts[row]), int(ends[row])) for row in asked]
        shards = tuple(replace(shard, scores=_scores(shard, runs, slots)) for shard in shards)
    return StepInputs(positions, known_tokens, last_of, last_slots, shards, known_tokens is None)


def _most_shards(tokens: int) -> int:
    """Return the largest useful number of shards.

    All shards read the same weights, or those of the head, from the same memory. Small shards take as long as these
    reads, and the more shards, the longer the reads take: each of ``p`` small shards has at least ``2 p`` tokens.
    """
    return max(1, tokens // _LARGE_SHARD, math.isqrt(tokens // 2))


def _scores(shard: Shard, runs: list[tuple[int, int, int, int]], slots: SlotTable) -> tuple[ScoreSpan, ...]:
    """Return the prompt tokens that ``shard`` scores.

    ``runs``: slot, first position in the sequence, and start and end among the step's tokens, of each row to score.
    """
    found = []
    for slot, begin, row_start, end in runs:
        offset = row_start - begin  # from positions in the sequence to indices among the step's tokens
        first = max(row_start, shard.start, offset + int(slots.prompt_start[slot]) - 1)
        stop = min(end, shard.end, offset + int(slots.prompt_tokens[slot]) - 1)
        if first < stop:
            start = first - offset + 1
            token_ids = slots.prompts[slot][start : start + stop - first]
            found.append(ScoreSpan(slot, start, first - shard.start, token_ids))
    return tuple(found)


def _cut(
    start: int,
    end: int,
    token_slots: np.ndarray,
    positions: np.ndarray,
    row_begins: np.ndarray,
    row_ends: np.ndarray,
    samples: np.ndarray,
    rows: np.ndarray,
    page_table: np.ndarray,
) -> Shard:
    first, last = np.searchsorted(row_ends, start, side="right"), np.searchsorted(row_begins, end, side="left")
    begins = np.maximum(row_begins[first:last], start)
    sampled = samples[np.searchsorted(samples, start) : np.searchsorted(samples, end)]
    attention = AttentionBatch(
        token_slots=token_slots[start:end],
        positions=positions[start:end],
        row_slots=rows[first:last],
        row_starts=begins - start,
        row_counts=np.minimum(row_ends[first:last], end) - begins,
        page_table=page_table,
    )
    return Shard(start, end, attention, sampled - start, token_slots[sampled], positions[sampled] + 1)
