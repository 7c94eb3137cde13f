"""How many pages will be in use at every future step, exactly to the page.

A sequence that decodes takes one token of every step, so its future is known until its end: a new page whenever its
length crosses a page, and everything given back at its end. A page of the prefix tree is in use until the last of
those who hold it ends. Steps count from the plan being built: entry 0 is that plan, with what it holds already applied.

A prefill that takes several steps ends early when other sequences finish and leave it more of each step. Such a
sequence is taken to grow from its earliest start and to hold until its latest end, which is never less than what it
does. At most one sequence is in that state.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.memory.pages import PagePool
from services.scheduler.core.memory.prefix_tree import ROOT, PrefixTree
from services.scheduler.core.memory.slots import Slots

FAR = np.iinfo(np.int64).max // 2  # an end that is not known


class Sequences(NamedTuple):
    """Sequences that run, or would be admitted now: int64 ``[sequences]`` each."""

    length: np.ndarray  # tokens computed, and at least those known at admission
    limit: np.ndarray  # it grows to `limit - 1` tokens at most: the last is sampled, never computed
    pages: np.ndarray  # of its page table at step 0
    delay: np.ndarray  # it decodes from step `delay + 1` on
    end: np.ndarray  # step that gives its pages back
    node: np.ndarray  # of the prefix tree: its first `depth[node]` pages are there, the others its own
    lent: np.ndarray  # so many leading pages are not given back at its end

    def take(self, indices: np.ndarray) -> "Sequences":
        """Those at ``indices``."""
        return Sequences(*(values[indices] for values in self))


def running_sequences(slots: Slots, step: int, without: np.ndarray | None = None) -> Sequences:
    """Everything that runs, as of the plan ``step``, less the slots ``without``."""
    active = slots.running_slots()
    if without is not None:
        active = np.setdiff1d(active, without, assume_unique=True)
    length = np.maximum(slots.scheduled[active], slots.given[active])
    end = np.maximum(slots.end_step[active] - step, 1)
    return Sequences(length, slots.limit[active], slots.page_count[active], slots.delay[active], end,
                     slots.node[active], slots.lent_pages[active])  # fmt: skip


class Forecast:
    """The curve of running sequences, to which candidates are added to see what would be. Makes nothing happen.

    ``lasting``: nodes that are held by something without an end; ``extra``: pages in use for good beside the tree.
    """

    def __init__(
        self, pool: PagePool, tree: PrefixTree, running: Sequences, lasting: list[int], extra: int, horizon: int
    ) -> None:
        self.horizon = horizon
        self._page_size = pool.page_size
        self._depth, self._sizes = tree.depth[: tree.top], tree.size[: tree.top]
        self._parent = tree.parent[: tree.top]
        self._own = self._own_pages(running) + extra
        self._ends = np.zeros(tree.top, np.int64)  # by node; 0 = not in use
        self._ends[lasting] = FAR
        self._raise(self._ends, np.array(lasting, np.int64))
        self._hold(self._ends, running)
        self.curve = self._own + self._tree_pages(self._ends)

    def with_candidates(self, candidates: Sequences) -> npt.NDArray[np.int64]:
        """Pages in use at steps ``0..horizon-1`` with ``candidates`` admitted now: int64 ``[horizon]``."""
        ends = self._ends.copy()
        self._hold(ends, candidates)
        return self._own + self._own_pages(candidates) + self._tree_pages(ends)

    def _own_pages(self, sequences: Sequences) -> npt.NDArray[np.int64]:
        """Pages of page tables that are not in the tree, at each step."""
        page_size, horizon = self._page_size, self.horizon
        depth = self._depth[sequences.node]
        first, count = growth(sequences, page_size)
        # Pages taken: a 2-D view of time, one column for each step within a page's worth of steps. A sequence stays in
        # its column, so it is one +1 where it begins and one -1 behind its last page.
        rows = horizon // page_size + 2
        row, column = np.divmod(first, page_size)
        begin = np.minimum(row, rows - 1) * page_size + column
        behind = np.minimum(row + count, rows - 1) * page_size + column
        starts = np.bincount(begin, minlength=rows * page_size) - np.bincount(behind, minlength=rows * page_size)
        taken = np.cumsum(starts.reshape(rows, page_size), axis=0).ravel()[:horizon]
        given_back = sequences.pages - np.maximum(depth, sequences.lent) + count
        at_end = np.bincount(np.clip(sequences.end, 0, horizon), weights=given_back, minlength=horizon + 1)
        return int((sequences.pages - depth).sum()) + np.cumsum(taken - at_end[:horizon].astype(np.int64))

    def _hold(self, ends: np.ndarray, sequences: Sequences) -> None:
        """Raise the ends of nodes to those of ``sequences``."""
        np.maximum.at(ends, sequences.node, np.where(sequences.lent > 0, FAR, sequences.end))
        self._raise(ends, sequences.node)

    def _raise(self, ends: np.ndarray, nodes: np.ndarray) -> None:
        """Raise the ends of what is above ``nodes`` to theirs."""
        touched = np.zeros(len(ends), bool)
        while True:
            touched[nodes] = True
            touched[ROOT] = False
            nodes = np.flatnonzero(touched)
            if len(nodes) == 0:
                return
            touched[nodes] = False
            np.maximum.at(ends, self._parent[nodes], ends[nodes])
            nodes = self._parent[nodes]

    def _tree_pages(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Pages of the tree in use at each step."""
        horizon = self.horizon
        released = np.bincount(np.minimum(ends, horizon), weights=self._sizes, minlength=horizon + 1)
        released[0] = 0  # never held, and the root
        return int(self._sizes[ends > 0].sum()) - np.cumsum(released[:horizon].astype(np.int64))


def growth(sequences: Sequences, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages that sequences will still take: the first at step ``first``, then one every page_size steps, ``count`` in
    all: (first, count)."""
    length, delay = sequences.length, sequences.delay
    first = delay + 1 + -length % page_size
    longest = np.minimum(sequences.limit - 1, length + np.maximum(sequences.end - 1 - delay, 0))
    return first, np.maximum(-(-longest // page_size) - sequences.pages, 0)
