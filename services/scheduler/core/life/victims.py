"""Chooses the sequences to preempt when pages run out, and those that may be preempted for higher classes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.scheduler.core.memory.prefix_tree import ROOT, PrefixTree
from services.scheduler.core.request import Priority, Sample
from services.scheduler.core.state import State

_MOST_PREEMPTIONS = 4  # preemptions of a sample for others after which it is protected
_LEAST_PROGRESS = 16  # tokens that a protected sample computes before it may be preempted for another key


def choose_victims(state: State, needed: int) -> npt.NDArray[np.int64]:
    """Return slots that release at least ``needed`` pages, or all eligible slots if these are too few.

    Only predicted sequences are eligible. Parked sequences come first, then lower classes, then sequences with less
    work, then those admitted later. Work is the number of computed tokens that no other sequence shares.
    """
    slots, tree = state.pool.slots, state.pool.tree
    eligible: npt.NDArray[np.int64] = np.flatnonzero(slots.active & ~slots.guaranteed)
    shared = np.maximum(_shared_pages(tree, slots.node[eligible]), slots.left_behind[eligible])
    alone = slots.page_count[eligible] - shared
    eligible, alone = eligible[alone > 0], alone[alone > 0]
    order = by_work(state, eligible)
    count = int(np.searchsorted(np.cumsum(alone[order]), needed)) + 1
    return eligible[order[:count]]


def by_work(state: State, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the order in which the slots ``chosen`` are preempted: int64 indices into them."""
    slots = state.pool.slots
    shared = _shared_pages(state.pool.tree, slots.node[chosen])
    work = np.maximum(slots.scheduled[chosen] - shared * state.pool.shape.page_size, 0)
    return np.lexsort((-slots.admitted_step[chosen], work, -slots.priority[chosen], ~slots.parked[chosen]))


def _shared_pages(tree: PrefixTree, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the leading pages of sequences on ``nodes`` that other sequences hold too: int32 beside ``nodes``."""
    nodes = nodes.copy()
    while (alone := (nodes != ROOT) & (tree.users[nodes] == 1)).any():
        nodes[alone] = tree.parent[nodes[alone]]
    return tree.depth[nodes]


def are_preemptible(state: State, samples: Sequence[Sample]) -> list[bool]:
    """Return whether each of ``samples``, which are being admitted, may be preempted for higher classes."""
    found = []
    before_ns = state.queue.waiting.overdue_before(Priority.LOW)
    left = -1  # number of further samples of class low that may be protected; -1 = not counted yet
    for sample in samples:
        preemptible = sample.request.priority == Priority.LOW and not sample.request.guaranteed
        overdue = before_ns is not None and sample.accepted_ns < before_ns
        if preemptible and not sample.request.parked and (sample.preempted_for_others >= _MOST_PREEMPTIONS or overdue):
            if left < 0:
                left = max(0, state.low_share - _count_protected(state))
            preemptible = left == 0
            left -= not preemptible
        found.append(preemptible)
    return found


def protected_lengths(samples: Sequence[Sample]) -> list[int]:
    """Return for each of ``samples`` the number of known tokens from which it may be preempted for other keys.

    A sample that was preempted four times for others first computes 16 more tokens. So keys do not take slots from each
    other without end.
    """
    protected = (sample.preempted_for_others >= _MOST_PREEMPTIONS for sample in samples)
    return [sample.given + _LEAST_PROGRESS if each else 0 for sample, each in zip(samples, protected, strict=True)]


def without_overdue(state: State, low: np.ndarray) -> np.ndarray:
    """Return the slots of ``low``, int64, that may still be preempted for higher classes.

    A sequence that would be overdue in the queue would only take its slot back. The oldest of these sequences become
    protected, up to the share of class ``low``.
    """
    slots, left = state.pool.slots, state.low_share - _count_protected(state)
    before_ns = state.queue.waiting.overdue_before(Priority.LOW)
    if left <= 0 or before_ns is None:
        return low
    overdue = low[slots.accepted_ns[low] < before_ns]
    holding = overdue[np.argsort(slots.accepted_ns[overdue], kind="stable")][:left]
    slots.preemptible[holding] = False
    return np.setdiff1d(low, holding)


def _count_protected(state: State) -> int:
    """Return the number of running sequences of class low that are protected."""
    slots = state.pool.slots
    running = slots.running_slots()
    return int(np.count_nonzero((slots.priority[running] == Priority.LOW) & ~slots.preemptible[running]))
