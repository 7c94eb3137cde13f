"""The input arrays of a step on a GPU, made from a batch and the state of the slots: rows of one token, then chunks."""

from dataclasses import dataclass

import numpy as np

from services.common.plan.types import Batch, Groups, micro_batches
from services.worker.attention.spans import Spans
from services.worker.runner.peers import GRAIN
from services.worker.step.slots import SlotTable


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a step, on the host. Rows of one token come first in batch order, then chunks in batch order."""

    token_slots: np.ndarray  # [tokens] int32
    positions: np.ndarray  # [tokens] int32, position in the sequence
    known: np.ndarray  # [tokens] int32, token id; -1 = the slot's last sampled token
    decodes: int  # rows of one token
    longest: int  # tokens of the longest context of a row of one token
    chunks: Spans | None
    groups: Spans | None  # of rows of one token
    prefix_tokens: np.ndarray | None  # [decodes] int32 beside groups
    keep: np.ndarray | None  # [samples] int32, indices of the tokens whose logits are sampled; None = all, in order
    sample_slots: np.ndarray  # [samples] int64
    sample_positions: np.ndarray  # [samples] int64, position of the sampled token
    batch_order: np.ndarray | None  # [samples] int64, index of the first sample in the batch, ...; None = same order


@dataclass(frozen=True)
class Standing:
    """A micro-batch, which later plans may repeat."""

    batch: Batch
    groups: Groups
    singles: bool  # every row computes one token; otherwise the next two are None
    spans: Spans | None  # of the groups
    prefix_tokens: np.ndarray | None  # [rows] int32 beside spans, 0 = no prefix

    @classmethod
    def of(cls, batch: Batch, groups: Groups, page_size: int) -> "Standing":
        """Return the micro-batch of a valid ``batch`` with valid ``groups``."""
        if (batch.token_counts != 1).any():
            return cls(batch, groups, False, None, None)
        return cls(batch, groups, True, *group_spans(groups, batch.slots, None, len(batch.slots), page_size))


def split(batch: Batch, groups: Groups, rows: tuple[int, ...], page_size: int) -> list[Standing]:
    """Split ``batch`` into micro-batches of ``rows`` rows each, with their groups. No ``rows`` = one micro-batch.

    The arguments are valid: no group is in two micro-batches.
    """
    parts, end = [], 0
    for part in micro_batches(batch, rows):
        begin, end = end, end + len(part.slots)
        parts.append(Standing.of(part, _within(groups, begin, end), page_size))
    return parts


def _within(groups: Groups, begin: int, end: int) -> Groups:
    """Return the groups of the rows from ``begin`` to ``end``, with starts relative to ``begin``."""
    inside = (groups.starts >= begin) & (groups.starts < end)
    if inside.all() and begin == 0:
        return groups
    return Groups(groups.starts[inside] - begin, groups.counts[inside], groups.prefix_pages[inside])


def build(batch: Batch, groups: Groups, slots: SlotTable, page_size: int) -> StepArrays:
    """Return the arrays of a valid ``batch`` with at least one row, and valid ``groups``."""
    rows, counts = batch.slots, batch.token_counts
    begins = slots.computed[rows]
    single = counts == 1
    decodes = int(np.count_nonzero(single))
    mixed = decodes < len(rows)
    order = np.argsort(~single, kind="stable") if mixed else None
    if mixed:
        rows, counts, begins = rows[order], counts[order], begins[order]
    ends = np.cumsum(counts)
    tokens = int(ends[-1])
    if mixed:
        token_slots = np.repeat(rows, counts)
        positions = np.arange(tokens) - np.repeat(ends - counts - begins, counts)
    else:
        token_slots, positions = rows, begins
    known = np.full(tokens, -1, np.int32)
    for row in np.flatnonzero(begins < slots.given[rows]).tolist():
        begin, end, count = int(begins[row]), int(ends[row]), int(counts[row])
        known[end - count : end] = slots.prompts[rows[row]][begin : begin + count]

    sampling = begins + counts == slots.known[rows]
    sampled = np.flatnonzero(sampling)
    all_sampled = not mixed and len(sampled) == len(rows)
    spans, prefix_tokens = group_spans(groups, rows, single if mixed else None, decodes, page_size)
    return StepArrays(
        token_slots=token_slots.astype(np.int32),
        positions=positions.astype(np.int32),
        known=known,
        decodes=decodes,
        longest=int(begins[:decodes].max()) + 1 if decodes else 0,
        chunks=_chunk_spans(rows, counts, begins, ends, decodes) if mixed else None,
        groups=spans,
        prefix_tokens=prefix_tokens,
        keep=None if all_sampled else (ends[sampled] - 1).astype(np.int32),
        sample_slots=rows[sampled],
        sample_positions=(begins + counts)[sampled],
        batch_order=np.argsort(order[sampled], kind="stable") if mixed else None,  # type: ignore[index]  # it is mixed
    )


def padded(size: int, grain: int = GRAIN) -> int:
    """Return the smallest positive multiple of ``grain`` that is at least ``size``."""
    return max(grain, -(-size // grain) * grain)


def fill_up(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """Return ``array`` with its first dimension extended to ``size`` by ``value``."""
    if len(array) == size:
        return array
    filled = np.full((size, *array.shape[1:]), value, array.dtype)
    filled[: len(array)] = array
    return filled


def _chunk_spans(rows: np.ndarray, counts: np.ndarray, begins: np.ndarray, ends: np.ndarray, decodes: int) -> Spans:
    columns = ((ends - counts)[decodes:], counts[decodes:], rows[decodes:], (begins + counts)[decodes:])
    return Spans(*(column.astype(np.int32) for column in columns))


def group_spans(
    groups: Groups,
    rows: np.ndarray,
    single: np.ndarray | None,
    decodes: int,
    page_size: int,
) -> tuple[Spans | None, np.ndarray | None]:
    """Return the groups as spans of the ``decodes`` rows of one token, and the prefix tokens of each of these rows.

    A group with a row of several tokens is left out. ``single [rows]`` bool: rows of one token, in batch order; None =
    all rows.
    """
    if not len(groups):
        return None, None
    order = np.argsort(groups.starts)  # a plan may have groups in any order, but spans must ascend
    starts, counts, prefixes = groups.starts[order], groups.counts[order], groups.prefix_pages[order] * page_size
    if single is not None and len(starts):
        before = np.concatenate(([0], np.cumsum(single)))
        whole = before[starts + counts] - before[starts] == counts
        starts, counts, prefixes = before[starts[whole]], counts[whole], prefixes[whole]
    if not len(starts):
        return None, None
    prefix_tokens = np.zeros(decodes, np.int32)
    within = np.repeat(starts - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(counts.sum())
    prefix_tokens[within] = np.repeat(prefixes, counts)
    spans = Spans(*(column.astype(np.int32) for column in (starts, counts, rows[starts], prefixes)))
    return spans, prefix_tokens
