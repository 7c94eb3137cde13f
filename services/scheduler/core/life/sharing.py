"""Prompts that are computed once for all samples of a request."""

import numpy as np

from services.scheduler.core.request import PromptShare, Request, Sample
from services.scheduler.core.state import State


class Sharing:
    """Holds the pages of a prompt from its computation by the leader until all samples of the request were admitted.

    The leader is the first sample of the request. Owned by the core.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def begin(self, leader: Sample) -> None:
        """Make the other samples of the request wait until ``prompt_computed`` is called for ``leader``."""
        leader.request.share = self._state.pool.sharing[leader.request] = PromptShare(leader)

    def prompt_computed(self, leader: Sample, step: int) -> None:
        """Hold the pages of the prompt, whose last token the plan ``step`` computes."""
        state, share, slot = self._state, leader.request.share, leader.slot
        if share is None or share.leader is not leader or share.ready_step:
            return
        whole, rest = divmod(leader.given - 1, state.pool.shape.page_size)
        share.node = int(state.pool.slots.node[slot])
        if state.pool.tree.depth[share.node] != whole:  # another request's pages are in the tree
            self.end(leader.request)
            return
        share.ready_step = step + 1
        state.pool.tree.attach(share.node)
        if rest:
            share.last_page = int(state.pool.slots.table[slot, whole])

    def end(self, request: Request) -> None:
        """Release the pages of the prompt, because no sample waits for them, or because they are needed elsewhere."""
        share, request.share = request.share, None
        if share is None:
            return
        del self._state.pool.sharing[request]
        if share.leader is not None:
            self._state.pool.slots.lent_pages[share.leader.slot] = 0
        if share.ready_step:
            self._state.pool.tree.detach(share.node)
        if share.owns_last_page:
            self._state.pool.pages.give(np.array([share.last_page]))

    def leader_leaves(self, sample: Sample, keep: bool) -> int:
        """Return how many pages outside the prefix tree stay with the share when ``sample`` leaves its slot.

        If ``sample`` is a leader whose prompt is incomplete, or if not ``keep``, the share ends.
        """
        request, share = sample.request, sample.request.share
        if share is None or share.leader is not sample:
            return 0
        if not keep or not share.ready_step:
            self.end(request)
            return 0
        share.leader = None  # if it is admitted again, it is not the leader
        share.owns_last_page = share.last_page >= 0
        return int(share.owns_last_page)
