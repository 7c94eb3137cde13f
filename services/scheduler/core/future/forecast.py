"""The exact number of pages in use at every future step, given the lengths of all sequences.

A sequence that decodes computes one token in every step, so its future is known: it takes a page whenever its length
passes a multiple of the page size, and releases all pages at its end. A page of the prefix tree is in use until the
last sequence that holds it ends. Steps count from the plan that is being built: entry 0 is that plan.

A prompt that takes several steps is computed earlier if other sequences finish and leave it more of each step. Such a
sequence is assumed to grow from its earliest start and to keep its pages until its latest end, which is never less than
its actual use. At most one sequence of each key is in that state.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.memory.pages import PagePool
from services.scheduler.core.memory.prefix_tree import ROOT, PrefixTree
from services.scheduler.core.memory.slots import Slots

FAR = np.iinfo(np.int64).max // 2  # an unknown end


class Sequences(NamedTuple):
    """Sequences that run, or candidates for admission. Columns are int64 ``[sequences]``."""

    length: np.ndarray  # tokens computed, at least the tokens known at admission
    limit: np.ndarray  # greatest length; the last token is sampled and never computed
    pages: np.ndarray  # length of its page table at step 0
    delay: np.ndarray  # it decodes from step ``delay + 1`` on
    end: np.ndarray  # step that releases its pages
    node: np.ndarray  # its node of the prefix tree, with its first ``depth[node]`` pages; the others are its own
    lent: np.ndarray  # number of leading pages that are kept after its end

    def take(self, indices: np.ndarray) -> "Sequences":
        """Return the sequences at ``indices``."""
        return Sequences(*(values[indices] for values in self))


def running_sequences(slots: Slots, step: int, without: np.ndarray | None = None) -> Sequences:
    """Return the running sequences as of the plan ``step``, except those in the slots ``without``."""
    active = slots.running_slots()
    if without is not None:
        active = np.setdiff1d(active, without, assume_unique=True)
    length = np.maximum(slots.scheduled[active], slots.given[active])
    end = np.maximum(slots.end_step[active] - step, 1)
    return Sequences(length, slots.limit[active], slots.page_count[active], slots.delay[active], end,
                     slots.node[active], slots.lent_pages[active])  # fmt: skip


class Forecast:
    """Pages in use by the running sequences, ``curve``, and with candidates added. Changes no state."""

    def __init__(
        self, pool: PagePool, tree: PrefixTree, running: Sequences, lasting: list[int], extra: int, horizon: int
    ) -> None:
        """Make the forecast of ``running`` for ``horizon`` steps.

        ``lasting`` are nodes that are held without an end, and ``extra`` is the number of such pages outside the tree.
        """
        self.horizon = horizon
        self._page_size = pool.page_size
        self._depth, self._sizes = tree.depth[: tree.top], tree.size[: tree.top]
        self._parent = tree.parent[: tree.top]
        self._own = self._own_pages(running) + extra
        self._ends = np.zeros(tree.top, np.int64)  # last end by node; 0 = not in use
        self._ends[lasting] = FAR
        self._raise(self._ends, np.array(lasting, np.int64))
        self._hold(self._ends, running)
        self.curve = self._own + self._tree_pages(self._ends)

    def with_candidates(self, candidates: Sequences) -> npt.NDArray[np.int64]:
        """Return the pages in use at steps 0 to ``horizon`` - 1 if ``candidates`` are admitted now: int64."""
        ends = self._ends.copy()
        self._hold(ends, candidates)
        return self._own + self._own_pages(candidates) + self._tree_pages(ends)

    def _own_pages(self, sequences: Sequences) -> npt.NDArray[np.int64]:
        """Return the pages in use outside the prefix tree at each step: int64 ``[horizon]``."""
        page_size, horizon = self._page_size, self.horizon
        depth = self._depth[sequences.node]
        first, count = growth(sequences, page_size)
        # Time as a table with ``page_size`` columns. A sequence takes a page every ``page_size`` steps, so it stays in
        # one column: +1 at its first page and -1 after its last page, summed over the rows.
        rows = horizon // page_size + 2
        row, column = np.divmod(first, page_size)
        begin = np.minimum(row, rows - 1) * page_size + column
        behind = np.minimum(row + count, rows - 1) * page_size + column
        starts = np.bincount(begin, minlength=rows * page_size) - np.bincount(behind, minlength=rows * page_size)
        taken = np.cumsum(starts.reshape(rows, page_size), axis=0).ravel()[:horizon]
        released = sequences.pages - np.maximum(depth, sequences.lent) + count
        at_end = np.bincount(np.clip(sequences.end, 0, horizon), weights=released, minlength=horizon + 1)
        return int((sequences.pages - depth).sum()) + np.cumsum(taken - at_end[:horizon].astype(np.int64))

    def _hold(self, ends: np.ndarray, sequences: Sequences) -> None:
        """Raise the ends of nodes to the ends of ``sequences``."""
        np.maximum.at(ends, sequences.node, np.where(sequences.lent > 0, FAR, sequences.end))
        self._raise(ends, sequences.node)

    def _raise(self, ends: np.ndarray, nodes: np.ndarray) -> None:
        """Raise the ends of the nodes above ``nodes`` to the ends of ``nodes``."""
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
        """Return the pages of the prefix tree in use at each step: int64 ``[horizon]``."""
        horizon = self.horizon
        released = np.bincount(np.minimum(ends, horizon), weights=self._sizes, minlength=horizon + 1)
        released[0] = 0  # unused nodes, and the root
        return int(self._sizes[ends > 0].sum()) - np.cumsum(released[:horizon].astype(np.int64))


def growth(sequences: Sequences, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, count) of the pages that sequences will take: int64 ``[sequences]`` each.

    A sequence takes ``count`` pages, the first at step ``first`` and then one every ``page_size`` steps.
    """
    length, delay = sequences.length, sequences.delay
    first = delay + 1 + -length % page_size
    longest = np.minimum(sequences.limit - 1, length + np.maximum(sequences.end - 1 - delay, 0))
    return first, np.maximum(-(-longest // page_size) - sequences.pages, 0)
