"""How a step's rows are cut into micro-batches and grouped: is it what the contract allows?"""

from typing import NamedTuple

import numpy as np

from services.scheduler.record.violation import PlanViolation

NONE = np.zeros(0, np.int64)


class Groups(NamedTuple):
    """Hydragen groups; parallel int64 arrays."""

    starts: np.ndarray = NONE  # first row
    counts: np.ndarray = NONE  # rows
    prefix_pages: np.ndarray = NONE  # leading pages that they share


def check_micro_batches(parts: np.ndarray, rows: int, most: int) -> None:
    """``parts``: rows of each micro-batch, int64; empty = the step is not cut."""
    if len(parts) > most:
        raise PlanViolation(f"{len(parts)} micro-batches, and the worker takes {most} at most")
    if len(parts) and parts.sum() != rows:
        raise PlanViolation(f"micro_batch_rows add up to {parts.sum()}, and the batch has {rows} rows")


def check_groups(
    groups: Groups,
    slots: np.ndarray,
    parts: np.ndarray,
    *,
    tables: np.ndarray,
    page_counts: np.ndarray,
    computed: np.ndarray,
    page_size: int,
) -> None:
    """``slots``: the batch, int64 ``[rows]``; ``parts`` as above. The rest is the worker's state over all its slots:
    page tables ``[slots, pages]``, their lengths, and tokens computed before the step.
    """
    starts, counts, prefix_pages = groups
    if not len(starts) == len(counts) == len(prefix_pages):
        raise PlanViolation(
            f"{len(starts)} starts, {len(counts)} counts and {len(prefix_pages)} prefix_pages of Hydragen groups"
        )
    if not len(starts):
        return
    ends = starts + counts
    _require(counts >= 1, starts, counts, "it has no rows")
    _require(prefix_pages >= 1, starts, counts, "it shares no pages")
    _require(ends <= len(slots), starts, counts, f"the batch has {len(slots)} rows")
    order = np.argsort(starts)
    _require(starts[order][1:] >= ends[order][:-1], starts[order][1:], counts[order][1:], "it overlaps another group")
    if len(parts):
        edges = np.cumsum(parts)
        first, last = np.searchsorted(edges, starts, side="right"), np.searchsorted(edges, ends - 1, side="right")
        _require(first == last, starts, counts, "it crosses the boundary of a micro-batch")
    for start, end, pages in zip(starts.tolist(), ends.tolist(), prefix_pages.tolist(), strict=True):
        _check_prefix(slots[start:end], pages, tables, page_counts, computed, page_size)


def _check_prefix(
    rows: np.ndarray, pages: int, tables: np.ndarray, page_counts: np.ndarray, computed: np.ndarray, page_size: int
) -> None:
    short = page_counts[rows] < pages
    if short.any():
        slot = int(rows[short][0])
        raise PlanViolation(f"its group shares {pages} pages, and it has {page_counts[slot]}", slot=slot)
    early = computed[rows] < pages * page_size
    if early.any():
        slot = int(rows[early][0])
        raise PlanViolation(
            f"its group shares {pages * page_size} tokens, and {computed[slot]} of its own are computed", slot=slot
        )
    other = tables[rows, :pages] != tables[rows[0], :pages]
    if other.any():
        row, column = np.argwhere(other)[0]
        slot = int(rows[row])
        raise PlanViolation(
            f"its group shares {pages} pages, and page {tables[rows[0], column]} is in this place in slot {rows[0]}",
            slot=slot,
            page=int(tables[slot, column]),
        )


def _require(good: np.ndarray, starts: np.ndarray, counts: np.ndarray, message: str) -> None:
    if not good.all():
        at = int(good.argmin())
        raise PlanViolation(f"the Hydragen group of {counts[at]} rows from row {starts[at]} on: {message}")
