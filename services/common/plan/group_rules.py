"""Rules about Hydragen groups: rows of the batch whose first pages are the same and computed."""

from collections.abc import Sequence

import numpy as np

from services.common.plan.slots import SlotState
from services.common.plan.types import Admission, Groups, LastPlan
from services.common.plan.verdict import BrokenPlan

_FIELD = "plan.hydragen"


def check_groups(
    now: LastPlan, admissions: Sequence[Admission], computed: np.ndarray, slots: SlotState, page_size: int
) -> None:
    """Raise ``BrokenPlan`` for the first breach in ``now.groups``.

    ``admissions`` are the plan's, which ``slots`` does not have yet. ``computed [max_slots]`` is as the plan's changes
    leave it.
    """
    groups, batch = now.groups, now.batch
    starts, counts, pages = len(groups.starts), len(groups.counts), len(groups.prefix_pages)
    if not starts == counts == pages:
        raise BrokenPlan.parallel(_FIELD, starts=starts, counts=counts, prefix_pages=pages)
    if not len(groups):
        return
    _check_ranges(groups, len(batch.slots))
    _check_cut(groups, now.micro_batch_rows)
    new = {admission.slot: admission.pages for admission in admissions}
    ranges = zip(groups.starts.tolist(), groups.counts.tolist(), groups.prefix_pages.tolist(), strict=True)
    for start, count, shared in ranges:
        rows = batch.slots[start : start + count]
        if (early := computed[rows] < shared * page_size).any():
            slot = int(rows[early][0])
            raise BrokenPlan(
                f"slot {slot}: {computed[slot]} tokens are computed, but its group shares {shared} pages of"
                f" {page_size} tokens; they must be computed before",
                field=f"{_FIELD}.prefix_pages",
                slot=slot,
            )
        here = [slot for slot in rows.tolist() if slot in new] if new else []
        known = rows[~np.isin(rows, here)] if here else rows
        first = new[here[0]][:shared] if len(known) == 0 else slots.page_table[known[0], :shared]
        same = (slots.page_table[known, :shared] == first).all() and all(
            np.array_equal(new[slot][:shared], first) for slot in here
        )
        if not same:
            raise BrokenPlan(
                f"the rows of the group at row {start} differ in their first {shared} pages", field=f"{_FIELD}.starts"
            )


def _check_ranges(groups: Groups, rows: int) -> None:
    starts, counts, pages = groups.starts, groups.counts, groups.prefix_pages
    if counts.min() < 1 or pages.min() < 1:
        raise BrokenPlan("counts and prefix_pages must be 1 or more", field=_FIELD)
    order = np.argsort(starts, kind="stable")
    ends = (starts + counts)[order]
    if ends[-1] > rows:
        raise BrokenPlan(f"a group ends at row {ends[-1]} of a batch of {rows} rows", field=f"{_FIELD}.counts")
    if (starts[order][1:] < ends[:-1]).any():
        raise BrokenPlan("two groups overlap", field=f"{_FIELD}.starts")


def _check_cut(groups: Groups, micro_batch_rows: tuple[int, ...]) -> None:
    for end in np.cumsum(micro_batch_rows[:-1]).tolist():
        across = (groups.starts < end) & (end < groups.starts + groups.counts)
        if across.any():
            raise BrokenPlan(
                f"the group at row {groups.starts[across][0]} goes on behind row {end}, where a micro-batch ends: cut"
                " it into two groups",
                field=f"{_FIELD}.counts",
            )
