"""Threads that run the shards of a step in parallel."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from services.common.boundaries import errors_to

T = TypeVar("T")
_Work = queue.SimpleQueue[tuple[Callable[[], Any], threading.Barrier | None] | None]  # None = end the thread
_Outcome = tuple[int, Any, BaseException | None]  # index of the job, result, exception


class ShardThreads:
    """A pool of ``size`` threads, including the caller's. Used by the compute thread alone.

    Each shard of a step runs in one thread. Torch's own parallelism forks and joins in every operator, which loses most
    of the time when another process briefly uses one of the cores.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._work: list[_Work] = [queue.SimpleQueue() for _ in range(size - 1)]
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        for index, work in enumerate(self._work):
            threading.Thread(target=self._serve, args=(index + 1, work), name=f"shard-{index + 1}", daemon=True).start()

    def run(self, jobs: Sequence[Callable[[], T]], barrier: threading.Barrier | None = None) -> list[T]:
        """Run at most ``size`` jobs, and return their results in order.

        Jobs may wait on ``barrier``. If a job fails, the barrier is broken, so that the others end, and the first
        exception is raised when all have ended.
        """
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
        """End the threads."""
        for work in self._work:
            work.put(None)

    def _serve(self, index: int, work: _Work) -> None:
        torch.set_num_threads(1)
        while (item := work.get()) is not None:
            self._done.put(_outcome(index, *item))


def _outcome(index: int, job: Callable[[], Any], barrier: threading.Barrier | None) -> _Outcome:
    errors: list[BaseException] = []
    with errors_to(errors.append, BaseException):
        return index, job(), None
    if barrier is not None:
        barrier.abort()
    return index, None, errors[0]
