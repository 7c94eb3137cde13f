"""The one judge of plans: the worker raises its verdict, and the recorder reports it as a violation.

A plan is judged whole before any of it is applied. ``StalePlan`` says that scheduler and worker disagree about the
state (steps, slots in use), ``BrokenPlan`` that the plan is wrong in any state. What pages hold is not judged here: the
recorder follows that (``services.scheduler.record.checker``).
"""

from typing import NamedTuple

import numpy as np

from services.common.plan.admission_rules import check_admission
from services.common.plan.group_rules import check_groups
from services.common.plan.slots import SlotState
from services.common.plan.types import LastPlan, Plan, WorkerLimits
from services.common.plan.verdict import BrokenPlan, StalePlan, check_pages, has_repeats


class _After(NamedTuple):
    """The state that releases, admissions and appends leave: arrays over slots, not to be written to."""

    used: np.ndarray
    known: np.ndarray
    computed: np.ndarray
    page_counts: np.ndarray


def check_plan(plan: Plan, last: LastPlan, slots: SlotState, limits: WorkerLimits) -> None:
    """Raise ``BrokenPlan`` or ``StalePlan`` for the first breach of the contract.

    ``plan`` follows ``last`` and meets a worker in the state ``slots``, which is not changed.
    """
    if plan.step != last.step + 1:
        raise StalePlan(f"step {plan.step} follows step {last.step}: expected {last.step + 1}")
    if plan.groups is not None and len(plan.groups):
        if not limits.hydragen:
            raise BrokenPlan("hydragen groups, but this worker's WorkerInfo.hydragen is false", field="plan.hydragen")
        if limits.window_tokens:
            message = f"hydragen groups, but this worker's WorkerInfo.window_tokens is {limits.window_tokens}"
            raise BrokenPlan(f"{message}: leave them out", field="plan.hydragen")
    _check_micro_batches(plan, limits)
    if plan.releases.size or plan.admissions or plan.append_slots.size or plan.append_pages.size:
        after = _change(plan, slots, limits)
    else:
        after = _After(slots.used, slots.known, slots.computed, slots.page_counts)
    _check_copies(plan, limits)
    now = last.followed_by(plan)
    if plan.batch is not None:
        _check_new_batch(plan, limits)
    _check_rows(now, after, limits)
    unchanged = plan.groups is None and plan.batch is None and not plan.admissions
    if not unchanged:
        check_groups(now, plan.admissions, after.computed, slots, limits.page_size)


def _check_micro_batches(plan: Plan, limits: WorkerLimits) -> None:
    rows, field = plan.micro_batch_rows, "plan.micro_batch_rows"
    most = limits.max_micro_batches
    if len(rows) > most:
        instead = "leave them out" if most == 1 else f"give at most {most}"
        raise BrokenPlan(
            f"{len(rows)} micro_batch_rows, but this worker's WorkerInfo.max_micro_batches is {most}: {instead}",
            field=field,
        )
    if rows and (plan.batch is None or sum(rows) != len(plan.batch.slots)):
        given = "no batch" if plan.batch is None else f"a batch of {len(plan.batch.slots)} rows"
        raise BrokenPlan(f"micro_batch_rows of {sum(rows)} rows beside {given}", field=field)


def _change(plan: Plan, slots: SlotState, limits: WorkerLimits) -> _After:
    """Check releases, admissions and appends. Return the state that they leave."""
    used, known, computed, pages = slots.used, slots.known, slots.computed, slots.page_counts.copy()
    if plan.releases.size or plan.admissions:
        used, known, computed = used.copy(), known.copy(), computed.copy()

    _check_slots(plan.releases, used, "release_slots", limits)
    if has_repeats(plan.releases):
        raise BrokenPlan("release_slots names a slot twice", field="plan.release_slots")
    used[plan.releases] = False

    for index, admission in enumerate(plan.admissions):
        field, slot = f"plan.admissions[{index}]", admission.slot
        check_admission(admission, field, limits)
        if used[slot]:
            raise StalePlan(f"{field}: slot {slot} is in use; release it first", slot=slot)
        used[slot] = True
        known[slot] = len(admission.token_ids)
        computed[slot] = admission.cached_tokens
        pages[slot] = len(admission.pages)

    if len(plan.append_slots) != len(plan.append_pages):
        lengths = {"append_slots": len(plan.append_slots), "append_pages": len(plan.append_pages)}
        raise BrokenPlan.parallel("plan", **lengths)
    _check_slots(plan.append_slots, used, "append_slots", limits)
    check_pages(plan.append_pages, "plan.append_pages", limits)
    np.add.at(pages, plan.append_slots, 1)
    if (long := pages[plan.append_slots] > limits.max_pages_per_slot).any():
        slot = int(plan.append_slots[long][0])
        raise BrokenPlan(
            f"slot {slot} would have {pages[slot]} pages: at most {limits.max_pages_per_slot}"
            f" hold max_context_tokens={limits.max_context_tokens}",
            field="plan.append_slots",
            slot=slot,
        )
    return _After(used, known, computed, pages)


def _check_copies(plan: Plan, limits: WorkerLimits) -> None:
    sources, targets = plan.copy_sources, plan.copy_targets
    if not (sources.size or targets.size):
        return
    if len(sources) != len(targets):
        raise BrokenPlan.parallel("plan", copy_source_pages=len(sources), copy_target_pages=len(targets))
    check_pages(sources, "plan.copy_source_pages", limits)
    check_pages(targets, "plan.copy_target_pages", limits)
    if has_repeats(targets):
        raise BrokenPlan("copy_target_pages names a page twice", field="plan.copy_target_pages")
    both = np.intersect1d(sources, targets)
    if len(both):
        raise BrokenPlan(f"page {both[0]} is copied from and onto in one plan", field="plan.copy_target_pages")


def _check_new_batch(plan: Plan, limits: WorkerLimits) -> None:
    assert plan.batch is not None
    rows, counts = plan.batch.slots, plan.batch.token_counts
    if len(counts) != len(rows):
        raise BrokenPlan.parallel("plan.batch", slots=len(rows), token_counts=len(counts))
    if has_repeats(rows):
        raise BrokenPlan("batch.slots names a slot twice", field="plan.batch.slots")
    if counts.size and counts.min() < 1:
        raise BrokenPlan("batch.token_counts holds a 0: expected 1 or more", field="plan.batch.token_counts")
    total = int(counts.sum())
    if total > limits.max_tokens_per_step:
        raise BrokenPlan(
            f"a batch of {total} tokens: at most max_tokens_per_step={limits.max_tokens_per_step}",
            field="plan.batch.token_counts",
        )


def _check_rows(now: LastPlan, after: _After, limits: WorkerLimits) -> None:
    """Check that the rows of the step can be computed."""
    rows, counts = now.batch.slots, now.batch.token_counts
    _check_slots(rows, after.used, "batch.slots", limits)
    known, paged = after.known[rows], after.page_counts[rows] * limits.page_size
    ends = after.computed[rows] + counts
    if (ends <= np.minimum(np.minimum(known, paged), limits.max_context_tokens)).all():
        return
    if (beyond := ends > known).any():
        slot, count = int(rows[beyond][0]), int(counts[beyond][0])
        raise BrokenPlan(
            f"slot {slot}: {count} tokens to compute, but only {after.known[slot] - after.computed[slot]} of its"
            f" {after.known[slot]} known tokens are not computed yet",
            field="plan.batch.token_counts",
            slot=slot,
        )
    if (beyond := ends > limits.max_context_tokens).any():
        slot = int(rows[beyond][0])
        raise BrokenPlan(
            f"slot {slot} would pass max_context_tokens={limits.max_context_tokens}; release it",
            field="plan.batch.slots",
            slot=slot,
        )
    short = ends > paged
    slot = int(rows[short][0])
    raise BrokenPlan(
        f"slot {slot}: its page table of {after.page_counts[slot]} pages of {limits.page_size} tokens is too short for"
        f" {int(ends[short][0])} tokens; append pages first",
        field="plan.append_slots",
        slot=slot,
    )


def _check_slots(slots: np.ndarray, used: np.ndarray, name: str, limits: WorkerLimits) -> None:
    if slots.size == 0:
        return
    if slots.max() >= limits.max_slots:
        raise BrokenPlan(
            f"{name}: slot {slots.max()} is out of range, max_slots={limits.max_slots}", field=f"plan.{name}"
        )
    if not used[slots].all():
        slot = int(slots[~used[slots]][0])
        raise StalePlan(f"{name}: slot {slot} is not in use; admit a sequence first", slot=slot)
