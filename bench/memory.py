"""The memory of processes during a measurement."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

_EVERY_S = 0.1


class PeakMemory:
    """A context that measures the largest resident memory of a process, in a thread.

    ``pids`` returns the processes, and is called for each sample since they may restart.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._peak = 0

    @property
    def megabytes(self) -> int:
        """The largest resident memory so far, in 10^6 bytes."""
        return self._peak // 10**6

    def __enter__(self) -> "PeakMemory":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        for pid in self._pids():
            with suppress(psutil.NoSuchProcess):  # the process was killed
                self._peak = max(self._peak, psutil.Process(pid).memory_info().rss)
