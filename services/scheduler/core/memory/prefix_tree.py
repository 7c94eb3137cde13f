"""Radix tree over whole pages of tokens, which finds pages by their content."""

import heapq
from collections.abc import Hashable

import numpy as np

from services.scheduler.core.memory.pages import PagePool

ROOT = 0

PageName = tuple[Hashable, bytes]  # (parent or salt, first page's tokens)
UNNAMED: PageName = (ROOT, b"")  # of the root, and of numbers that are free


class PrefixTree:
    """Cache of computed pages. Owned by the core.

    A node is a run of pages that follow those of its parent. Siblings differ in their first page. Requests of different
    salts have different children of the root. A sequence is attached to one node, and holds the pages from the root
    through this node.

    A node without users is cached, or released at once if ``keep`` is false. Pages of cached nodes are evicted from the
    leaves, least recently used first. If a node is split, the part with the last page keeps the number, so sequences
    attached to it do not change.
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
        self.users = np.zeros(nodes, np.int32)  # attached sequences, and children with users
        self.group = np.full(nodes, -1, np.int32)  # Hydragen group of the attached sequences; -1 = none
        self.top = 1
        self._ready = np.zeros(nodes, np.int64)  # first step whose plan may use the pages
        self._children = np.zeros(nodes, np.int32)
        self._stamps = np.zeros(nodes, np.int64)
        self._pages: list[np.ndarray] = [np.zeros(0, np.int32)] * nodes
        self._keys = [UNNAMED] * nodes
        self._nodes: dict[PageName, int] = {}
        self._free: list[int] = []
        self._clock = 0
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

    def key(self, tokens: np.ndarray, salt: Hashable, node: int, at: int) -> PageName:
        """Return the name of page ``at`` of ``tokens`` as the first page of a child of ``node``."""
        size = self._pool.page_size
        return salt if node == ROOT else node, tokens[at * size : (at + 1) * size].tobytes()

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

    def attach(self, node: int, count: int = 1) -> None:
        """Attach ``count`` more sequences to ``node``."""
        users = self.users
        while True:
            before = int(users[node])
            users[node] = before + count
            if before or node == ROOT:
                return
            self._pool.in_use += int(self.size[node])
            node, count = int(self.parent[node]), 1

    def detach(self, node: int) -> None:
        """Detach one sequence from ``node``."""
        users = self.users
        while True:
            left = int(users[node]) - 1
            users[node] = left
            if left or node == ROOT:
                return
            parent = int(self.parent[node])
            self._note_unused(node)
            node = parent

    def extend(self, node: int, tokens: np.ndarray, salt: Hashable, pages: np.ndarray, ready_step: int) -> int:
        """Add ``pages`` with ``tokens`` as a child of ``node``, and attach a sequence of ``node`` to it instead.

        Return the node of the sequence: ``node`` itself if it has a child with the same first page, as then the pages
        stay the sequence's own.
        """
        key = self.key(tokens, salt, node, 0)
        if key in self._nodes:
            return node
        child = self._add(key, node, pages, ready_step)
        self._children[node] += 1
        self.depth[child] = self.depth[node] + len(pages)
        self.group[child] = self.group[node]
        self.users[child] = 1  # the parent keeps one user: the child instead of the sequence
        return child

    def forget(self, node: int) -> None:
        """Remove ``node`` and the nodes above it, up to the first node with users or other children."""
        while self._keys[node] is not UNNAMED and not self.users[node] and not self._children[node]:
            parent = int(self.parent[node])
            self._pool.give_cached(self._remove(node))
            self._note_leaf(parent)
            node = parent

    def _add(self, key: PageName, parent: int, pages: np.ndarray, ready_step: int) -> int:
        if self._free:
            node = self._free.pop()
        else:
            node, self.top = self.top, self.top + 1
        self._nodes[key], self._keys[node] = node, key
        self._pages[node], self.size[node] = pages, len(pages)
        self.parent[node], self._children[node] = parent, 0
        self._ready[node] = ready_step
        return node

    def _split(self, node: int, count: int) -> int:
        """Split ``node`` after its first ``count`` pages. Return the new node with these pages."""
        pages, parent = self._pages[node], int(self.parent[node])
        upper = self._add(self._keys[node], parent, pages[:count], int(self._ready[node]))
        self._children[upper] = 1
        self.depth[upper] = self.depth[node] - len(pages) + count
        self.group[upper] = self.group[parent]
        self.users[upper] = 1 if self.users[node] else 0
        self._stamps[upper] = self._stamps[node]
        key = (upper, self._pool.tokens[pages[count]].tobytes())
        self._nodes[key], self._keys[node] = node, key
        self._pages[node], self.size[node], self.parent[node] = pages[count:], len(pages) - count, upper
        return upper

    def _note_unused(self, node: int) -> None:
        self._pool.in_use -= int(self.size[node])
        self._clock += 1
        self._stamps[node] = self._clock
        if self._children[node]:
            return
        if self._keep:
            self._note_leaf(node)
        else:
            self._pool.give_cached(self._remove(node))

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
                pages = pages[-count:]
            else:
                parent = int(self.parent[node])
                self._remove(node)
                self._note_leaf(parent)
            self._pool.give_cached(pages)
            count -= len(pages)

    def _remove(self, node: int) -> np.ndarray:
        """Remove a leaf. Return its pages."""
        del self._nodes[self._keys[node]]
        self._keys[node] = UNNAMED
        self._children[self.parent[node]] -= 1
        self.parent[node], self.group[node] = ROOT, -1
        self._free.append(node)
        pages, self._pages[node] = self._pages[node], np.zeros(0, np.int32)
        return pages
