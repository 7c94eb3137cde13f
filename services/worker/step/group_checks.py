"""Whether a plan's Hydragen groups are what they say: rows of the batch whose first pages are the same and computed."""

import numpy as np

from services.common.errors import InvalidRequest
from services.worker.step.plan import Admission, Batch, Groups
from services.worker.step.slots import SlotTable

FIELD = "plan.hydragen"


def check_groups(
    groups: Groups,
    batch: Batch,
    admissions: tuple[Admission, ...],
    computed: np.ndarray,
    slots: SlotTable,
    page_size: int,
) -> None:
    """Raises ``InvalidRequest`` for the first breach. ``computed [max_slots]``: tokens, after the plan's changes."""
    starts, counts, pages = groups.starts, groups.counts, groups.prefix_pages
    if not len(starts) == len(counts) == len(pages):
        raise InvalidRequest(
            f"{len(starts)} starts, {len(counts)} counts and {len(pages)} prefix_pages: they are parallel", field=FIELD
        )
    if len(starts) == 0:
        return
    if counts.min() < 1 or pages.min() < 1:
        raise InvalidRequest("counts and prefix_pages must be 1 or more", field=FIELD)
    order = np.argsort(starts, kind="stable")
    ends = (starts + counts)[order]
    if ends[-1] > len(batch.slots):
        raise InvalidRequest(
            f"a group ends at row {ends[-1]} of a batch of {len(batch.slots)} rows", field=f"{FIELD}.counts"
        )
    if (starts[order][1:] < ends[:-1]).any():
        raise InvalidRequest("two groups overlap", field=f"{FIELD}.starts")
    new = {admission.slot: admission.pages for admission in admissions}
    for start, count, shared in zip(starts.tolist(), counts.tolist(), pages.tolist(), strict=True):
        rows = batch.slots[start : start + count]
        if (computed[rows] < shared * page_size).any():
            slot = int(rows[computed[rows] < shared * page_size][0])
            raise InvalidRequest(
                f"slot {slot}: {computed[slot]} tokens are computed, but its group shares {shared} pages of"
                f" {page_size} tokens; they must be computed before",
                field=f"{FIELD}.prefix_pages",
            )
        here = [slot for slot in rows.tolist() if slot in new] if new else []
        known = rows[~np.isin(rows, here)] if here else rows
        first = new[here[0]][:shared] if len(known) == 0 else slots.page_table[known[0], :shared]
        same = (slots.page_table[known, :shared] == first).all() and all(
            np.array_equal(new[slot][:shared], first) for slot in here
        )
        if not same:
            raise InvalidRequest(
                f"the rows of the group at row {start} differ in their first {shared} pages", field=f"{FIELD}.starts"
            )
