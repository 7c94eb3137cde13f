"""A few threads that run the parts of a step side by side."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_Work = queue.SimpleQueue[tuple[Callable[[], Any], threading.Barrier | None] | None]  # None = no more
_Outcome = tuple[int, Any, BaseException | None]  # of which job, its result, what it failed with


class ShardThreads:
    """``size`` threads with the caller's as the first; used by the compute thread alone.

    Each part of a step runs whole in one thread: torch's own way, a fork and a join in every operator, loses most of
    its time when another process takes one of the cores for a moment.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._work: list[_Work] = [queue.SimpleQueue() for _ in range(size - 1)]
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        for index, work in enumerate(self._work):
            threading.Thread(target=self._serve, args=(index + 1, work), name=f"shard-{index + 1}", daemon=True).start()

    def run(self, jobs: Sequence[Callable[[], T]], barrier: threading.Barrier | None = None) -> list[T]:
        """The results of at most ``size`` jobs, in order. ``barrier``, which the jobs may wait on, is broken when one
        fails, so that the others end; the first failure is raised when all have ended."""
        if len(jobs) == 1:
            return [jobs[0]()]
        for job, work in zip(jobs[1:], self._work, strict=False):
            work.put((job, barrier))
        outcomes = [_outcome(0, jobs[0], barrier), *(self._done.get() for _ in jobs[1:])]
        outcomes.sort(key=lambda outcome: outcome[0])
        failures = [error for _, _, error in outcomes if error is not None]
        for error in failures:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if failures:
            raise failures[0]
        return [result for _, result, _ in outcomes]

    def close(self) -> None:
        """Let the threads end."""
        for work in self._work:
            work.put(None)

    def _serve(self, index: int, work: _Work) -> None:
        torch.set_num_threads(1)
        while (item := work.get()) is not None:
            self._done.put(_outcome(index, *item))


def _outcome(index: int, job: Callable[[], Any], barrier: threading.Barrier | None) -> _Outcome:
    try:
        return index, job(), None
    except BaseException as error:
        if barrier is not None:
            barrier.abort()
        return index, None, error
