"""The batch of a plan: order of rows, Hydragen groups and micro-batches. It is sent only if it changed."""

import numpy as np

from services.common.plan.types import Batch, Groups
from services.scheduler.core.memory.hydragen import HydragenPolicy, choose_groups
from services.scheduler.core.plan import NO_SLOTS, PlannedStep
from services.scheduler.core.state import State
from services.scheduler.core.step.arrangement import arrange

_REGROUP_SHARE = 20  # groups are chosen again after changes of one in this number of running sequences


class Batching:
    """The batch that was sent last. Owned by the core, for as long as one worker is attached."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._last_slots = self._last_counts = self._last_micro_batch_rows = NO_SLOTS
        self._last_groups = np.zeros((3, 0), np.int64)
        self._membership = 0  # of the pool, when groups were chosen last
        self._prefix_pages = NO_SLOTS
        self._no_groups = np.full(len(state.pool.slots.active), -1, np.int32)

    def fill(
        self, plan: PlannedStep, decoding: np.ndarray, prefilling: list[tuple[int, int]], *, regroup: bool
    ) -> None:
        """Put the rows into ``plan``. ``regroup`` allows a new choice of Hydragen groups."""
        state, policy = self._state, self._state.policy
        shape = state.pool.shape
        hydragen = policy.hydragen if shape.hydragen and not shape.window_tokens else None
        if regroup and hydragen is not None:
            self._regroup(hydragen)
        plan.micro_batches = policy.micro_batches
        if not prefilling and policy.micro_batches == 1 and not len(self._prefix_pages):
            self._fill_plain(plan, decoding)
            return
        rows = np.array(prefilling, np.int64).reshape(-1, 2)
        groups = (
            state.pool.tree.group[state.pool.slots.node[decoding]]
            if len(self._prefix_pages)
            else self._no_groups[decoding]
        )
        least = hydragen.min_group_size if hydragen else 1
        batch = arrange(decoding, groups, self._prefix_pages, rows[:, 0], rows[:, 1], min_rows=least,
                        micro_batches=policy.micro_batches)  # fmt: skip
        plan.sequences = len(batch.slots)
        counts = batch.counts if prefilling else NO_SLOTS
        self._set_batch(plan, batch.slots, counts, batch.micro_batch_rows)
        self._set_groups(plan, np.stack((batch.group_starts, batch.group_counts, batch.group_pages)))
        plan.hydragen_groups, plan.hydragen_rows = len(batch.group_counts), int(batch.group_counts.sum())
        state.queue.counters.batch_rows += plan.sequences
        state.queue.counters.hydragen_rows += plan.hydragen_rows

    def _fill_plain(self, plan: PlannedStep, decoding: np.ndarray) -> None:
        """Put rows into a plan without prompts, groups and micro-batches. Most plans are such, so this is fast."""
        plan.sequences = len(decoding)
        self._set_batch(plan, decoding, NO_SLOTS, NO_SLOTS)
        if self._last_groups.size:
            self._set_groups(plan, np.zeros((3, 0), np.int64))
        self._state.queue.counters.batch_rows += plan.sequences

    def _regroup(self, policy: HydragenPolicy) -> None:
        state = self._state
        changed = state.pool.membership - self._membership
        if changed * _REGROUP_SHARE < state.pool.slots.running or not changed:
            return
        self._membership = state.pool.membership
        tree = state.pool.tree
        rows = state.pool.slots.node[state.pool.slots.active]
        grouping = choose_groups(
            tree.parent[: tree.top], tree.depth[: tree.top], rows, state.pool.shape.page_size, policy
        )
        tree.group[: tree.top] = grouping.of_node
        self._prefix_pages = grouping.prefix_pages

    def _set_batch(self, plan: PlannedStep, slots: np.ndarray, counts: np.ndarray, parts: np.ndarray) -> None:
        columns = ((slots, self._last_slots), (counts, self._last_counts), (parts, self._last_micro_batch_rows))
        if not len(plan.releases) and not plan.admissions and all(a is b or np.array_equal(a, b) for a, b in columns):
            return
        self._last_slots, self._last_counts, self._last_micro_batch_rows = slots, counts, parts
        plan.batch = Batch(slots, counts if len(counts) else np.ones(len(slots), np.int64))
        plan.micro_batch_rows = tuple(parts.tolist())

    def _set_groups(self, plan: PlannedStep, groups: np.ndarray) -> None:
        if not np.array_equal(groups, self._last_groups):
            self._last_groups = groups
            plan.groups = Groups(*groups)
