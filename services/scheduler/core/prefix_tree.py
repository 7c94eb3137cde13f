"""Finds pages by their content: a page's tokens behind the page before it."""

import heapq

import numpy as np

from services.scheduler.core.pages import PagePool


class PrefixTree:
    """A node is a registered page; its key is its parent page (or the request's salt, for a first page) and its tokens.

    A holder of a page holds all its ancestors, so a page without holders has no held descendants and every cached page
    can be evicted, leaves first, longest unused first. Owned by the core.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        pool.evict, pool.unused = self._evict, self._unused
        self._pages: dict[tuple[int | str, bytes], int] = {}
        self._keys: list[tuple[int | str, bytes] | None] = [None] * pool.size
        self._children = np.zeros(pool.size, np.int32)
        self._ready = np.zeros(pool.size, np.int64)  # first step whose plan may use the page
        self._stamps = np.zeros(pool.size, np.int64)
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (stamp, page); stale entries are skipped

    def match(self, tokens: np.ndarray, salt: str, most: int, step: int) -> tuple[np.ndarray, bool]:
        """The longest run of registered pages that ``tokens`` begins with, at most ``most`` of them.

        The flag says that there is more, but only for plans behind ``step``: it is being computed now.
        """
        size, data = self._pool.page_size * 4, tokens.tobytes()
        parent: int | str = salt
        found: list[int] = []
        early = False
        for index in range(most):
            page = self._pages.get((parent, data[index * size : (index + 1) * size]))
            if page is None:
                break
            if self._ready[page] > step:
                early = True
                break
            found.append(page)
            parent = page
        return np.array(found, np.int32), early

    def register(self, tokens: np.ndarray, salt: str, pages: np.ndarray, first: int, end: int, ready_step: int) -> int:
        """Register pages ``first..end-1`` of a sequence whose first ``first`` pages are registered; returns how many
        of its pages are now. It ends where another page has the same content already.
        """
        size, data = self._pool.page_size * 4, tokens.tobytes()
        parent: int | str = int(pages[first - 1]) if first else salt
        for index in range(first, end):
            page = int(pages[index])
            key = (parent, data[index * size : (index + 1) * size])
            if self._pages.setdefault(key, page) != page:
                return index
            self._keys[page] = key
            self._pool.registered[page] = True
            self._ready[page] = ready_step
            if index:
                self._children[parent] += 1
            parent = page
        return end

    def forget(self, pages: np.ndarray) -> None:
        """Take what can be taken of a failed sequence's pages (in its order) out of the tree."""
        for page in pages[::-1].tolist():
            if self._pool.registered[page]:
                if self._children[page] or self._pool.refs[page] > 1:
                    return
                self._remove(page)

    def _unused(self, pages: np.ndarray) -> None:
        self._clock += 1
        self._stamps[pages] = self._clock
        for page in pages[self._children[pages] == 0].tolist():
            self._push(page)

    def _push(self, page: int) -> None:
        heapq.heappush(self._leaves, (int(self._stamps[page]), page))
        if len(self._leaves) > 2 * self._pool.size + 64:
            self._leaves = [entry for entry in set(self._leaves) if self._evictable(*entry)]
            heapq.heapify(self._leaves)

    def _evictable(self, stamp: int, page: int) -> bool:
        pool = self._pool
        return bool(
            pool.registered[page] and pool.refs[page] == 0 and not self._children[page] and self._stamps[page] == stamp
        )

    def _evict(self, count: int) -> None:
        freed: list[int] = []
        while len(freed) < count:
            stamp, page = heapq.heappop(self._leaves)
            if self._evictable(stamp, page):
                self._remove(page)
                freed.append(page)
        self._pool.give_free(np.array(freed, np.int32))

    def _remove(self, page: int) -> None:
        parent, _ = key = self._keys[page]
        del self._pages[key]
        self._keys[page] = None
        self._pool.registered[page] = False
        if isinstance(parent, int):
            self._children[parent] -= 1
            if self._children[parent] == 0 and self._pool.refs[parent] == 0:
                self._push(parent)
