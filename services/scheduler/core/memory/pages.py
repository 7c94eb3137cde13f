"""The pool of KV pages."""

from collections.abc import Callable

import numpy as np


class OutOfPages(Exception):
    """A plan needs more pages than there are. This is a defect: admission and preemption must prevent it."""


class PagePool:
    """Allocator of the pages 0 to ``size`` - 1. Owned by the core.

    A page is free, in use, or cached. A page in use belongs to one sequence, or to a node of the prefix tree that
    sequences hold. A cached page belongs to a node that no sequence holds.
    """

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self.tokens = np.zeros((size, page_size), np.uint32)  # valid up to the last computed position
        self.in_use = 0
        self._free = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.free = size  # number of free pages, which are the first of ``_free``
        self.evict: Callable[[int], None] = lambda count: None  # set by the prefix tree: frees ``count`` cached pages

    @property
    def available(self) -> int:
        """The number of pages that can be taken: free pages, and cached pages after eviction."""
        return self.size - self.in_use

    @property
    def cached(self) -> int:
        """The number of cached pages."""
        return self.size - self.free - self.in_use

    @property
    def free_pages(self) -> np.ndarray:
        """The free pages: int32 ``[free]``."""
        return self._free[: self.free]

    def take(self, count: int) -> np.ndarray:
        """Return ``count`` pages for one owner each: int32. If too few are free, evict cached pages.

        Raises ``OutOfPages``.
        """
        if count > self.free:
            if count > self.available:
                raise OutOfPages(f"{count} pages needed, {self.available} of {self.size} not in use")
            self.evict(count - self.free)
        self.free -= count
        self.in_use += count
        return self._free[self.free : self.free + count].copy()

    def give(self, pages: np.ndarray) -> None:
        """Release pages of one owner each."""
        self.in_use -= len(pages)
        self.give_cached(pages)

    def give_cached(self, pages: np.ndarray) -> None:
        """Release pages that are not in use."""
        self._free[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
