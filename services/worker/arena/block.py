"""Blocks of memory with a fixed address, on a CPU."""

import contextlib
import mmap
from typing import Protocol

import torch


class Block(Protocol):
    """A range of addresses. Its memory is zeros at first, and after ``restore``."""

    tensor: torch.Tensor  # [size] uint8; not to be used between ``release`` and ``restore``

    def release(self) -> None:
        """Give the memory back, and keep the addresses."""

    def restore(self) -> None:
        """Take memory again. Raises ``torch.OutOfMemoryError`` if there is too little."""


class HostBlock:
    """A block in the memory of the host."""

    def __init__(self, size: int) -> None:
        """``size`` is in bytes. Raises ``MemoryError``."""
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{size} bytes: {error}") from error
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Do nothing: the kernel adds pages of zeros when they are used."""
