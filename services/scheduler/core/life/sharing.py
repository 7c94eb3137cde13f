"""Prompts that the samples of one request share before all of them run."""

import numpy as np

from services.scheduler.core.request import PromptShare, Request, Sample
from services.scheduler.core.state import State


class Sharing:
    """The first sample of a request, the leader, computes the prompt; its pages are held until every sibling has them.

    Owned by the core.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def begin(self, leader: Sample) -> None:
        """Siblings wait for what ``leader`` computes; they may use it when ``ready`` says so."""
        leader.request.share = self._state.pool.sharing[leader.request] = PromptShare(leader)

    def ready(self, leader: Sample, step: int) -> None:
        """The plan ``step`` computes the last of the prompt."""
        state, share, slot = self._state, leader.request.share, leader.slot
        if share is None or share.leader is not leader or share.ready_step:
            return
        whole, rest = divmod(leader.given - 1, state.pool.shape.page_size)
        share.node = int(state.pool.slots.node[slot])
        if state.pool.tree.depth[share.node] != whole:  # somebody else's pages are in its place: siblings find those
            self.end(leader.request)
            return
        share.ready_step = step + 1
        state.pool.tree.attach(share.node)
        if rest:
            share.last_page = int(state.pool.slots.table[slot, whole])

    def end(self, request: Request) -> None:
        """Let go of the prompt's pages: nobody waits for them, or they are needed elsewhere."""
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

    def leave(self, sample: Sample, keep: bool) -> int:
        """What becomes of the prompt that ``sample`` computed for its siblings; returns how many of its own pages stay
        with the share."""
        request, share = sample.request, sample.request.share
        if share is None or share.leader is not sample:
            return 0
        if not keep or not share.ready_step:
            self.end(request)
            return 0
        share.leader = None  # it may come back, as one of many
        share.owns_last_page = share.last_page >= 0
        return int(share.owns_last_page)
