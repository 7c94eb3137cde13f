"""The pool of KV pages."""

from collections.abc import Callable

import numpy as np


class OutOfPages(Exception):
    """A plan needs more pages than there are. A defect: admission and preemption should have prevented it."""


class PagePool:
    """Pages are numbers ``0..size-1``. A page is free, in use (the own page of one sequence, or in a node of the prefix
    tree that a sequence holds), or cached: in a node that nobody holds. Owned by the core.
    """

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self.tokens = np.zeros((size, page_size), np.uint32)  # what the pages hold; valid as far as computed
        self.in_use = 0
        self._free = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._free_count = size
        # Set by the prefix tree: free this many cached pages.
        self.evict: Callable[[int], None] = lambda count: None

    @property
    def free(self) -> int:
        return self._free_count

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and cached ones after eviction."""
        return self.size - self.in_use

    @property
    def cached(self) -> int:
        return self.size - self._free_count - self.in_use

    def take(self, count: int) -> np.ndarray:
        """``count`` pages for one owner each, int32; cached pages are evicted when needed."""
        if count > self._free_count:
            if count > self.available:
                raise OutOfPages(f"{count} pages needed, {self.available} of {self.size} not in use")
            self.evict(count - self._free_count)
        self._free_count -= count
        self.in_use += count
        return self._free[self._free_count : self._free_count + count].copy()

    def give(self, pages: np.ndarray) -> None:
        """Own pages come back."""
        self.in_use -= len(pages)
        self.give_cached(pages)

    def give_cached(self, pages: np.ndarray) -> None:
        """Put pages that are not in use back on the stack of free pages."""
        self._free[self._free_count : self._free_count + len(pages)] = pages
        self._free_count += len(pages)
