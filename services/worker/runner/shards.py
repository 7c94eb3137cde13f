"""Threads that run the shards of a step in parallel, or share its operators."""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from services.common.boundaries import errors_to

T = TypeVar("T")
_Work = queue.SimpleQueue[Callable[[], object] | None]  # None = end the thread
_Outcome = tuple[int, Any, BaseException | None]  # index of the job, result, exception


class ShardThreads:
    """A pool of ``size`` threads, including the caller's. Used by the compute thread alone.

    Each shard of a step runs in one thread, or all threads share a compiled function. Torch's own parallelism forks and
    joins in every operator, which loses most of the time when another process briefly uses one of the cores.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._work: list[_Work] = [queue.SimpleQueue() for _ in range(size - 1)]
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        for index, work in enumerate(self._work, 1):
            threading.Thread(target=self._serve, args=(work,), name=f"shard-{index}", daemon=True).start()

    def run(self, jobs: Sequence[Callable[[], T]], barrier: threading.Barrier | None = None) -> list[T]:
        """Run at most ``size`` jobs, and return their results in order.

        Jobs may wait on ``barrier``. If a job fails, the barrier is broken, so that the others end, and the first
        exception is raised when all have ended.
        """
        if len(jobs) == 1:
            return [jobs[0]()]
        for index, job in enumerate(jobs[1:], 1):
            self._work[index - 1].put(partial(self._finish, index, job, barrier))
        outcomes = [_outcome(0, jobs[0], barrier), *(self._done.get() for _ in jobs[1:])]
        outcomes.sort(key=lambda outcome: outcome[0])
        failures = [error for _, _, error in outcomes if error is not None]
        for error in failures:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if failures:
            raise failures[0]
        return [result for _, result, _ in outcomes]

    def assist(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Start fewer than ``size`` jobs in other threads, and do not wait for them. They raise nothing."""
        for job, work in zip(jobs, self._work, strict=False):
            work.put(job)

    def close(self) -> None:
        """End the threads."""
        for work in self._work:
            work.put(None)

    def _finish(self, index: int, job: Callable[[], object], barrier: threading.Barrier | None) -> None:
        self._done.put(_outcome(index, job, barrier))

    @staticmethod
    def _serve(work: _Work) -> None:
        torch.set_num_threads(1)
        while (job := work.get()) is not None:
            job()
            del job  # it may hold the arrays of a step


def _outcome(index: int, job: Callable[[], Any], barrier: threading.Barrier | None) -> _Outcome:
    errors: list[BaseException] = []
    with errors_to(errors.append, BaseException):
        return index, job(), None
    if barrier is not None:
        barrier.abort()
    return index, None, errors[0]
