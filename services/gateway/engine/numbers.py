"""Numbers that other processes can read: every gateway of a deployment counts in a file of its own, and whichever is
asked for metrics adds up all of them.

A file outlives its process, and the one that follows goes on counting in it: no sum ever falls. Counting is a write to
mapped memory, as cheap as to a list. There are no locks: each number has one writer and is read and written whole.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.common.errors import Unavailable

_COUNT = 32768


class Numbers:
    """Float64 numbers, 0 at first, given out in the order in which they are asked for."""

    def __init__(self, memory: bytearray | mmap.mmap | memoryview | None = None) -> None:
        self._free = memoryview(bytearray(8 * _COUNT) if memory is None else memory).cast("B").cast("d")

    @classmethod
    def of_file(cls, path: Path) -> "Numbers":
        """Those in ``path``, for this process to count in; the file is made if it is not there."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Not sparse: where the disk is full later, writing to a page that it does not have would kill the process.
            os.posix_fallocate(descriptor, 0, 8 * _COUNT)
            numbers = cls(mmap.mmap(descriptor, 8 * _COUNT))
        except OSError as error:
            raise Unavailable(f"no room for metrics in {path} ({error.strerror}); free some space") from error
        finally:
            os.close(descriptor)
        numbers.take(1)[0] = os.getpid()
        return numbers

    @classmethod
    def sum_of(cls, paths: Sequence[Path]) -> "Numbers":
        """The sums over ``paths`` at this moment. A file that nobody has begun is as good as zeros."""
        total = np.zeros(_COUNT)
        for path in paths:
            if _begun(path):
                total += np.memmap(path, np.float64, "r")
        numbers = cls(total.data)
        numbers.take(1)
        return numbers

    def take(self, count: int) -> "memoryview[float]":
        """The next ``count``."""
        taken, self._free = self._free[:count], self._free[count:]
        if len(taken) < count:
            raise ValueError(f"there is no room for {count} more numbers; raise _COUNT")
        return taken


def counting_process(path: Path) -> int | None:
    """The id of the process that counts in ``path``, or was the last to do so; None when there was none yet."""
    return int(np.memmap(path, np.float64, "r")[0]) if _begun(path) else None


def _begun(path: Path) -> bool:
    return path.exists() and path.stat().st_size == 8 * _COUNT
