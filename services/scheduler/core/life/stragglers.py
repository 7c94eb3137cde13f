"""Stragglers: the samples of a group that have not finished when a given number has. A group is one request.

A request may end its stragglers, or park them. Parked samples keep their tokens. They are admitted only while no other
sample waits, and are preempted as soon as another sample of any class needs their slots or pages. A running sample
stays in its slot when it is parked.
"""

import numpy as np

from services.scheduler.core.life.sharing import Sharing
from services.scheduler.core.request import Request
from services.scheduler.core.state import State


class Stragglers:
    """Parks samples, and marks the samples in the tail of a group for the counters. Owned by the core."""

    def __init__(self, state: State, shares: Sharing) -> None:
        self._state = state
        self._shares = shares

    def sample_ended(self, request: Request) -> None:
        """Mark the rest of ``request`` if it is in the tail, and park it if it is due. A sample of it has ended."""
        if request.in_tail:
            self._state.pool.slots.tail[_slots_of(request)] = True
        if request.park_after is not None and request.completed >= request.park_after:
            self.park(request)

    def park(self, request: Request) -> None:
        """Park the unfinished samples of ``request``. Does nothing if they are parked."""
        if request.parked:
            return
        state, running = self._state, _slots_of(request)
        waiting = [sample for sample in request.samples if sample.slot < 0 and not sample.finished]
        for sample in waiting:
            state.queue.waiting.remove(sample)
        request.parked = True
        for sample in waiting:
            state.queue.waiting.push(sample)
        self._shares.end(request)  # its pages stay cached until others need them
        state.pool.slots.parked[running] = True
        state.pool.slots.guaranteed[running] = False

    def release_prompts(self) -> None:
        """Release the shared prompts that are held for parked samples."""
        for request in [request for request in self._state.pool.sharing if request.parked]:
            self._shares.end(request)


def _slots_of(request: Request) -> np.ndarray:
    """Return the slots of the running samples of ``request``: int64."""
    return np.array([each.slot for each in request.samples if each.slot >= 0 and not each.finished], np.int64)
