"""How long all sequences of a worker wait for the grammar of one."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from services.worker.sampling.follower import Follower

MOST_WAIT_S = 2.0  # for what is being compiled, in a step: wall clock
MOST_MASK_S = 0.5  # for a token of one sequence: CPU of the thread where it is alone, wall clock for several together
_WATCHED = 32  # calls for each of several that took too long together


class Patience:
    """Fails sequences whose grammar takes too long. Several threads may use it at once for different sequences.

    Ranks must agree on what a sequence may have next, and their clocks do not. So only the one that reports has bounds:
    it tells the scheduler, and what the others make of a sequence that has failed there matters to nobody.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._bounded = bounded

    def until(self) -> float | None:
        """When what is not compiled yet has failed, by ``time.monotonic``; None = never."""
        return time.monotonic() + MOST_WAIT_S if self._bounded else None

    def call(
        self, followers: Sequence[Follower], one: Callable[[int], Any], together: Callable[[list[int]], Any]
    ) -> None:
        """``one(i)`` for those of ``followers [n]`` that are watched, and ``together`` for all others. Who takes too
        long when watched fails; of several that took too long together each is watched next time."""
        if len(followers) == 1:
            self._watch(followers[0], one, 0)
            return
        others = []
        for index, follower in enumerate(followers):
            if follower.watched:
                follower.watched -= 1
                self._watch(follower, one, index)
            else:
                others.append(index)
        if not others:
            return
        before = time.monotonic()
        together(others)
        if self._bounded and time.monotonic() - before > MOST_MASK_S:
            for index in others:
                followers[index].watched = _WATCHED

    def _watch(self, follower: Follower, one: Callable[[int], Any], index: int) -> None:
        before = time.thread_time()
        one(index)
        if self._bounded and time.thread_time() - before > MOST_MASK_S:
            follower.fail(f"a token took it more than {MOST_MASK_S:g} s: simplify it")
