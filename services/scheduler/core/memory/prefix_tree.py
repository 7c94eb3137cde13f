"""Radix tree over whole pages of tokens, which finds pages by their content."""

import heapq
from collections.abc import Hashable

import numpy as np

from services.scheduler.core.memory.pages import PagePool

ROOT = 0

PageName = tuple[Hashable, bytes]  # (parent or (epoch, salt), first page's tokens)
UNNAMED: PageName = (ROOT, b"")  # of the root, and of numbers that are free


class PrefixTree:
    """Cache of computed pages. Owned by the core.

    A node is a run of pages that follow those of its parent. Siblings differ in their first page. Requests of different
    salts have different children of the root. A sequence is attached to one node, and holds the pages from the root
    through this node, or only those from some page on if its window has left the others behind.

    A node without users is cached. It is released at once if ``keep`` is false, or if its pages cannot be found any
    more. Pages of cached nodes are evicted from the leaves, least recently used first. If a node is split, the part
    with the last page keeps the number, so sequences attached to it do not change.

    A node without users can be above a node with users, because of windows. If there are no more leaves to evict, it is
    removed too. Then the nodes below it become children of the root with names that are never looked up, so no path
    with missing pages is found. Their depth stays.

    After ``reset``, pages that were computed before are never found. Sequences that hold them keep them.
    """

    def __init__(self, pool: PagePool, *, keep: bool = True) -> None:
        self._pool = pool
        self._keep = keep
        pool.evict = self._evict
        nodes = pool.size + 1  # a node has at least one page
        # Columns by node. Node 0 is the root. ``top`` is one above the highest number in use.
        self.parent = np.full(nodes, -1, np.int32)
        self.size = np.zeros(nodes, np.int32)  # pages
        self.depth = np.zeros(nodes, np.int32)  # pages from the root through this node
        self.users = np.zeros(nodes, np.int32)  # sequences that hold the pages; undefined for the root
        self.group = np.full(nodes, -1, np.int32)  # Hydragen group of the attached sequences; -1 = none
        self.top = 1
        self.epoch = 0  # number of resets
        self._epochs = np.zeros(nodes, np.int64)  # epoch in which the pages were computed
        self._ready = np.zeros(nodes, np.int64)  # first step whose plan may use the pages
        self._children = np.zeros(nodes, np.int32)
        self._stamps = np.zeros(nodes, np.int64)
        self._pages: list[np.ndarray] = [np.zeros(0, np.int32)] * nodes
        self._keys = [UNNAMED] * nodes
        self._nodes: dict[PageName, int] = {}
        self._free: list[int] = []
        self._clock = self._cuts = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (stamp, node); outdated entries are skipped

    def match(self, tokens: np.ndarray, salt: Hashable, most: int, step: int) -> tuple[int, bool]:
        """Return the last node of the longest path whose pages ``tokens`` begins with, at most ``most`` pages.

        The flag is true if a longer path is being computed, which only plans after ``step`` may use.
        """
        node, at = ROOT, 0
        while at < most:
            child = self._nodes.get(self.key(tokens, salt, node, at))
            if child is None:
                break
            if self._ready[child] > step:
                return node, True
            pages = self._pages[child][: most - at]
            size = self._pool.page_size
            given = tokens[at * size : (at + len(pages)) * size].reshape(-1, size)
            same = (self._pool.tokens[pages] == given).all(axis=1)
            count = len(pages) if same.all() else int(same.argmin())
            if count < self.size[child]:
                return self._split(child, count), False
            node, at = child, at + count
        return node, False

    def key(self, tokens: np.ndarray, salt: Hashable, node: int, at: int, epoch: int | None = None) -> PageName:
        """Return the name of page ``at`` of ``tokens`` as the first page of a child of ``node``.

        ``epoch`` is that in which the page was computed, or None for the current one.
        """
        size = self._pool.page_size
        parent = (self.epoch if epoch is None else epoch, salt) if node == ROOT else node
        return parent, tokens[at * size : (at + 1) * size].tobytes()

    def reset(self) -> int:
        """Let no later request find the present pages. Return how many pages this frees."""
        self.epoch += 1
        cached = self._pool.cached
        self._evict(cached)
        return cached

    def path(self, node: int) -> np.ndarray:
        """Return the pages from the root through ``node``: int32 ``[depth]``."""
        parts = []
        while node != ROOT:
            parts.append(self._pages[node])
            node = int(self.parent[node])
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *parts[::-1]])

    def nodes(self) -> dict[int, np.ndarray]:
        """Return the pages of each node but the root: int32 ``[size]``."""
        return {node: self._pages[node] for node in self._nodes.values()}

    def attach(self, node: int, count: int = 1, first: int = 0) -> None:
        """Attach ``count`` more sequences to ``node``, which hold the pages of its path from number ``first`` on."""
        self._end_node_at(node, first)
        while self.depth[node] > first:
            if not self.users[node]:
                self._pool.in_use += int(self.size[node])
            self.users[node] += count
            node = int(self.parent[node])

    def detach(self, node: int, first: int = 0) -> None:
        """Detach one sequence from ``node``, which holds the pages of its path from number ``first`` on."""
        while self.depth[node] > first:
            node = self._drop(node)

    def leave_behind(self, node: int, first: int, end: int) -> None:
        """Release the pages ``first`` to ``end`` - 1 of the path of a sequence that is attached to ``node``."""
        self._end_node_at(node, end)
        while self.depth[node] > end:
            node = int(self.parent[node])
        self.detach(node, first)

    def extend(
        self,
        node: int,
        tokens: np.ndarray,
        salt: Hashable,
        pages: np.ndarray,
        ready_step: int,
        epoch: int | None = None,
    ) -> int:
        """Add ``pages`` with ``tokens`` as a child of ``node``, and attach a sequence of ``node`` to it instead.

        ``epoch`` is that in which the sequence was admitted, or None for the current one.

        Return the node of the sequence: ``node`` itself if it has a child with the same first page, as then the pages
        stay the sequence's own.
        """
        key = self.key(tokens, salt, node, 0, epoch)
        if key in self._nodes:
            return node
        child = self._add(key, node, pages, ready_step, self.epoch if epoch is None else epoch)
        self._children[node] += 1
        self.depth[child] = self.depth[node] + len(pages)
        self.group[child] = self.group[node]
        self.users[child] = 1
        return child

    def forget(self, node: int) -> None:
        """Remove ``node`` and the nodes above it, up to the first node with users or other children."""
        while self._keys[node] is not UNNAMED and not self.users[node] and not self._children[node]:
            parent = int(self.parent[node])
            self._remove(node)
            node = parent

    def _add(self, key: PageName, parent: int, pages: np.ndarray, ready_step: int, epoch: int) -> int:
        if self._free:
            node = self._free.pop()
        else:
            node, self.top = self.top, self.top + 1
        self._nodes[key], self._keys[node] = node, key
        self._pages[node], self.size[node] = pages, len(pages)
        self.parent[node], self._children[node] = parent, 0
        self._ready[node], self._epochs[node] = ready_step, epoch
        return node

    def _split(self, node: int, count: int) -> int:
        """Split ``node`` after its first ``count`` pages. Return the new node with these pages."""
        pages, parent = self._pages[node], int(self.parent[node])
        upper = self._add(self._keys[node], parent, pages[:count], int(self._ready[node]), int(self._epochs[node]))
        self._children[upper] = 1
        self.depth[upper] = self.depth[node] - len(pages) + count
        self.group[upper] = self.group[parent]
        self.users[upper] = self.users[node]
        self._stamps[upper] = self._stamps[node]
        key = (upper, self._pool.tokens[pages[count]].tobytes())
        self._nodes[key], self._keys[node] = node, key
        self._pages[node], self.size[node], self.parent[node] = pages[count:], len(pages) - count, upper
        return upper

    def _end_node_at(self, node: int, end: int) -> None:
        """Split a node of the path of ``node`` if page number ``end`` of the path is inside of it."""
        if not end:
            return
        while self.depth[node] - self.size[node] > end:
            node = int(self.parent[node])
        count = end - int(self.depth[node]) + int(self.size[node])
        if 0 < count < self.size[node]:
            self._split(node, count)

    def _drop(self, node: int) -> int:
        """Take one user from ``node``. Return its parent."""
        parent = int(self.parent[node])
        self.users[node] -= 1
        if self.users[node]:
            return parent
        self._pool.in_use -= int(self.size[node])
        self._clock += 1
        self._stamps[node] = self._clock
        if self._keep and self._epochs[node] == self.epoch:
            self._note_leaf(node)
        else:
            self._remove(node)
        return parent

    def _note_leaf(self, node: int) -> None:
        if node == ROOT or self.users[node] or self._children[node]:
            return
        heapq.heappush(self._leaves, (int(self._stamps[node]), node))
        if len(self._leaves) > 2 * self._pool.size + 64:
            self._leaves = [entry for entry in set(self._leaves) if self._evictable(*entry)]
            heapq.heapify(self._leaves)

    def _evictable(self, stamp: int, node: int) -> bool:
        known = self._keys[node] is not UNNAMED and self._stamps[node] == stamp
        return bool(known and not self.users[node] and not self._children[node])

    def _evict(self, count: int) -> None:
        while count > 0:
            if not self._leaves:
                self._evict_left_behind(count)
                return
            stamp, node = heapq.heappop(self._leaves)
            if not self._evictable(stamp, node):
                continue
            pages = self._pages[node]
            if len(pages) > count:
                self._pages[node] = pages[:-count]
                self.size[node] -= count
                self.depth[node] -= count
                self.group[node] = -1  # the removed pages may be shared by its group
                heapq.heappush(self._leaves, (stamp, node))
                self._pool.give_cached(pages[-count:])
            else:
                self._remove(node)
            count -= len(pages)

    def _evict_left_behind(self, count: int) -> None:
        """Evict pages of nodes that are above nodes with users: least recently used first, then the deepest first."""
        nodes = np.flatnonzero((self.users[: self.top] == 0) & (self.size[: self.top] > 0))
        for node in nodes[np.lexsort((-self.depth[nodes], self._stamps[nodes]))].tolist():
            if count <= 0:
                return
            if self.size[node] > count:
                self._split(node, int(self.size[node]) - count)
            count -= int(self.size[node])
            self._remove(node)

    def _remove(self, node: int) -> None:
        """Remove a node without users, and release its pages."""
        if self._children[node]:
            self._cut_off(np.flatnonzero(self.parent[: self.top] == node))
        parent = int(self.parent[node])
        del self._nodes[self._keys[node]]
        self._keys[node] = UNNAMED
        self._children[parent] -= 1
        self.parent[node], self.size[node], self.group[node] = ROOT, 0, -1
        self._children[node] = 0
        self._free.append(node)
        self._pool.give_cached(self._pages[node])
        self._pages[node] = np.zeros(0, np.int32)
        self._note_leaf(parent)

    def _cut_off(self, children: np.ndarray) -> None:
        """Make ``children`` of a node, which is about to be removed, children of the root that no lookup finds."""
        for child in children.tolist():
            self._cuts += 1
            del self._nodes[self._keys[child]]
            self._keys[child] = (-self._cuts, b"")
            self._nodes[self._keys[child]] = child
            self.parent[child] = ROOT
            self._children[ROOT] += 1
