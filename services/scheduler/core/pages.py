"""The pool of KV pages: who holds which, and when each will be given back."""

from collections.abc import Callable

import numpy as np

FAR = np.iinfo(np.int64).max // 2  # an end that is not known


class OutOfPages(Exception):
    """A plan needs more pages than there are. In ``guaranteed`` mode a defect: admission should have prevented it."""


class PagePool:
    """Pages are numbers ``0..size-1``. A page is free, held by ``refs`` holders, or cached: held by none, but its
    content is registered in the prefix tree.

    Every page in use also has an end, the step whose plan releases it: the latest of its holders'. Owned by the core.
    """

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self.refs = np.zeros(size, np.int32)
        self.registered = np.zeros(size, bool)
        self.tokens = np.zeros((size, page_size), np.uint32)  # what the pages hold; valid as far as computed
        self.in_use = 0
        self.ends = np.zeros(size, np.int64)  # of pages in use, absolute step
        self._at_end = np.zeros(size, np.int32)  # holders whose end is the page's
        self.ends_stale = False  # some end is later than its holders': see `restore_ends`
        self._free = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._free_count = size
        # Set by the prefix tree: free this many cached pages; told of registered pages that lost their last holder.
        self.evict: Callable[[int], None] = lambda count: None
        self.unused: Callable[[np.ndarray], None] = lambda pages: None

    @property
    def free(self) -> int:
        return self._free_count

    @property
    def cached(self) -> int:
        return self.size - self._free_count - self.in_use

    def take(self, count: int, ends: np.ndarray | int) -> np.ndarray:
        """``count`` pages with one holder each that lets go at ``ends``; cached pages are evicted when needed."""
        if count > self._free_count:
            if count > self.size - self.in_use:
                raise OutOfPages(f"{count} pages needed, {self.size - self.in_use} of {self.size} not in use")
            self.evict(count - self._free_count)
        self._free_count -= count
        pages = self._free[self._free_count : self._free_count + count].copy()
        self.refs[pages] = 1
        self.ends[pages] = ends
        self._at_end[pages] = 1
        self.in_use += count
        return pages

    def hold(self, pages: np.ndarray, end: int) -> None:
        """One more holder for each of ``pages`` (no repeats), until ``end``."""
        refs = self.refs[pages]
        fresh = refs == 0
        self.in_use += int(np.count_nonzero(fresh))
        self.refs[pages] = refs + 1
        before = np.where(fresh, -1, self.ends[pages])
        self._at_end[pages] = np.where(end > before, 1, self._at_end[pages] + (end == before))
        self.ends[pages] = np.maximum(before, end)

    def drop(self, pages: np.ndarray, end: int) -> None:
        """One holder less, whose end was ``end``. Pages without holders become free or, registered, cached."""
        refs = self.refs[pages] - 1
        self.refs[pages] = refs
        self._leave(pages[refs > 0], end)
        idle = pages[refs == 0]
        self.in_use -= len(idle)
        registered = self.registered[idle]
        self.give_free(idle[~registered])
        if registered.any():
            self.unused(idle[registered])

    def move_end(self, pages: np.ndarray, before: int, after: int) -> None:
        """One holder of each of ``pages`` will let go at ``after``, not ``before``."""
        alone = self.refs[pages] == 1
        self.ends[pages[alone]] = after
        shared = pages[~alone]
        self._leave(shared, before)
        known = self.ends[shared]
        self._at_end[shared] = np.where(after > known, 1, self._at_end[shared] + (after == known))
        self.ends[shared] = np.maximum(known, after)

    def give_free(self, pages: np.ndarray) -> None:
        """Put ``pages`` (neither held nor registered) back on the stack of free pages."""
        self._free[self._free_count : self._free_count + len(pages)] = pages
        self._free_count += len(pages)

    def restore_ends(self, pages: np.ndarray, ends: np.ndarray) -> None:
        """Set all ends anew from all holders: parallel arrays, one entry for each page and holder."""
        order = np.argsort(ends, kind="stable")
        self.ends[pages[order]] = ends[order]  # of equal pages the last one stays
        self._at_end[pages] = 0
        np.add.at(self._at_end, pages[ends == self.ends[pages]], 1)
        self.ends_stale = False

    def _leave(self, pages: np.ndarray, end: int) -> None:
        last = pages[self.ends[pages] == end]
        self._at_end[last] -= 1
        self.ends_stale |= bool((self._at_end[last] == 0).any())
