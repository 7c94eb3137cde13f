"""Chooses who makes room when predictions were wrong."""

import numpy as np

from services.scheduler.core.prefix_tree import ROOT, PrefixTree
from services.scheduler.core.state import State


def choose_victims(state: State, needed: int) -> np.ndarray:
    """Slots that together hold ``needed`` pages alone, those with the least work to lose; fewer if there are no more.

    Only predicted sequences; of lower classes before higher ones, of equal work the latest come. Work is the tokens
    that only this sequence has computed.
    """
    slots, tree = state.slots, state.tree
    eligible = np.flatnonzero(slots.active & ~slots.guaranteed)
    shared = _shared_pages(tree, slots.node[eligible])
    alone = slots.page_count[eligible] - shared
    eligible, shared, alone = eligible[alone > 0], shared[alone > 0], alone[alone > 0]
    work = np.maximum(slots.scheduled[eligible] - shared * state.shape.page_size, 0)
    order = np.lexsort((-slots.admitted_step[eligible], work, -slots.priority[eligible]))
    count = int(np.searchsorted(np.cumsum(alone[order]), needed)) + 1
    return eligible[order[:count]]


def _shared_pages(tree: PrefixTree, nodes: np.ndarray) -> np.ndarray:
    """Leading pages of sequences on ``nodes`` that somebody else holds too: int32 beside ``nodes``."""
    nodes = nodes.copy()
    while (alone := (nodes != ROOT) & (tree.users[nodes] == 1)).any():
        nodes[alone] = tree.parent[nodes[alone]]
    return tree.depth[nodes]
