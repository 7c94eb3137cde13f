"""Counters in memory-mapped files, which other processes can read.

Each gateway of a deployment counts in its own file. The gateway that serves ``/metrics`` adds up all files. A restarted
gateway continues to count in the file of its predecessor, so that no sum ever decreases. Counting is a write to mapped
memory, as cheap as to a list. No locks are needed: each number has one writer and is read and written whole.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.common.errors import Unavailable

_COUNT = 65536


class Numbers:
    """An array of float64 numbers, initially 0. Each ``take`` returns the next ones."""

    def __init__(self, memory: bytearray | mmap.mmap | memoryview | None = None) -> None:
        self._free = memoryview(bytearray(8 * _COUNT) if memory is None else memory).cast("B").cast("d")

    @classmethod
    def of_file(cls, path: Path) -> "Numbers":
        """Map the file ``path`` for this process to count in. Create it if it does not exist."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Allocate all blocks now. On a full disk, a write to an unallocated page would kill the process.
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
        """Return the current sums over ``paths``. A file that does not exist yet counts as zeros."""
        total = np.zeros(_COUNT)
        for path in paths:
            if _exists(path):
                total += np.memmap(path, np.float64, "r")
        numbers = cls(total.data)
        numbers.take(1)
        return numbers

    def take(self, count: int) -> "memoryview[float]":
        """Return the next ``count`` numbers."""
        taken, self._free = self._free[:count], self._free[count:]
        if len(taken) < count:
            raise ValueError(f"there is no room for {count} more numbers; raise _COUNT")
        return taken


def counting_process(path: Path) -> int | None:
    """Return the id of the last process that counted in ``path``, or None if there was none."""
    return int(np.memmap(path, np.float64, "r")[0]) if _exists(path) else None


def _exists(path: Path) -> bool:
    return path.exists() and path.stat().st_size == 8 * _COUNT
