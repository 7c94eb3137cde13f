"""The steps at which pages of the prefix tree are released: by node, or by page if sequences leave pages behind."""

import numpy as np
import numpy.typing as npt

from services.common.plan.types import WorkerLimits
from services.scheduler.core.future.sequences import FAR, Sequences, leaving_of
from services.scheduler.core.memory.prefix_tree import ROOT, PrefixTree


class NodeEnds:
    """Ends of nodes, if every sequence holds all pages of its path until its end."""

    def __init__(self, tree: PrefixTree) -> None:
        self._sizes, self._parent = tree.size[: tree.top], tree.parent[: tree.top]
        self._ends = np.zeros(tree.top, np.int64)  # last end by node; 0 = not in use

    def keep(self, nodes: list[int]) -> None:
        """Hold the paths of ``nodes`` without an end."""
        self._raise(self._ends, np.array(nodes, np.int64), np.full(len(nodes), FAR))

    def hold(self, sequences: Sequences) -> None:
        """Hold the paths of ``sequences`` until their ends."""
        self._hold(self._ends, sequences)

    def in_use(self, horizon: int) -> npt.NDArray[np.int64]:
        """Return the pages in use at each step: int64 ``[horizon]``."""
        return self._in_use(self._ends, horizon)

    def in_use_with(self, candidates: Sequences, horizon: int) -> npt.NDArray[np.int64]:
        """Return the pages in use at each step if ``candidates`` hold their paths too: int64 ``[horizon]``."""
        ends = self._ends.copy()
        self._hold(ends, candidates)
        return self._in_use(ends, horizon)

    def _hold(self, ends: np.ndarray, sequences: Sequences) -> None:
        self._raise(ends, sequences.node, np.where(sequences.lent > 0, FAR, sequences.end))

    def _raise(self, ends: np.ndarray, nodes: np.ndarray, steps: np.ndarray) -> None:
        """Raise ``ends`` of the paths of ``nodes`` to ``steps``, both int64 ``[sequences]``."""
        np.maximum.at(ends, nodes, steps)
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

    def _in_use(self, ends: np.ndarray, horizon: int) -> npt.NDArray[np.int64]:
        released = np.bincount(np.minimum(ends, horizon), weights=self._sizes, minlength=horizon + 1)
        released[0] = 0  # unused nodes, and the root
        return int(self._sizes[ends > 0].sum()) - np.cumsum(released[:horizon].astype(np.int64))


class PageEnds:
    """Ends of pages, if sequences leave the first pages of their paths behind."""

    def __init__(self, tree: PrefixTree, tables: np.ndarray, limits: WorkerLimits) -> None:
        """Hold no page. ``tables`` are the page tables of the slots, int32."""
        self._tree, self._tables, self._limits = tree, tables, limits
        self._ends = np.zeros(limits.page_count, np.int64)  # last end by page; 0 = not in use
        self._paths: dict[int, np.ndarray] = {}  # of candidates, by node
        self._curve: npt.NDArray[np.int64] | None = None  # ``in_use``, once candidates are added

    def keep(self, nodes: list[int]) -> None:
        """Hold the paths of ``nodes`` without an end."""
        for node in nodes:
            self._ends[self._tree.path(node)] = FAR

    def hold(self, sequences: Sequences) -> None:
        """Hold the pages of the paths of ``sequences`` until they are left behind or these end."""
        pages, ends = self._held(sequences)
        np.maximum.at(self._ends, pages, ends)
        self._curve = None

    def in_use(self, horizon: int) -> npt.NDArray[np.int64]:
        """Return the pages in use at each step: int64 ``[horizon]``."""
        held = self._ends[self._ends > 0]
        return len(held) - np.cumsum(_count(held, horizon))

    def in_use_with(self, candidates: Sequences, horizon: int) -> npt.NDArray[np.int64]:
        """Return the pages in use at each step if ``candidates`` hold their paths too: int64 ``[horizon]``."""
        if self._curve is None or len(self._curve) != horizon:
            self._curve = self.in_use(horizon)
        held, ends = self._held(candidates)
        pages, at = np.unique(held, return_inverse=True)
        before = self._ends[pages]
        after = before.copy()
        np.maximum.at(after, at, ends)
        released = _count(after, horizon) - _count(before[before > 0], horizon)
        return self._curve + np.count_nonzero(before == 0) - np.cumsum(released)

    def _held(self, sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
        """Return (pages, ends) of the pages of the tree that ``sequences`` hold: int32 and int64 ``[pages held]``."""
        first, end = sequences.left_behind, np.minimum(self._tree.depth[sequences.node], sequences.pages)
        columns = np.arange(int(end.max(initial=0)))
        tables = self._tables[sequences.slot, : len(columns)]
        # The path of a candidate is not in a page table yet.
        for row in np.flatnonzero((sequences.slot < 0) & (end > 0)).tolist():
            node = int(sequences.node[row])
            if node not in self._paths:
                self._paths[node] = self._tree.path(node)
            tables[row, : end[row]] = self._paths[node][: end[row]]
        holder, page = np.nonzero((columns >= first[:, None]) & (columns < end[:, None]))
        leaving = leaving_of(sequences, self._limits).take(holder)
        ends = np.where(sequences.lent > 0, FAR, sequences.end)[holder]
        return tables[holder, page], np.where(page < leaving.end, leaving.step(page), ends)


def _count(steps: np.ndarray, horizon: int) -> npt.NDArray[np.int64]:
    """Return the number of ``steps`` that equal each step below ``horizon``: int64 ``[horizon]``."""
    counts: npt.NDArray[np.int64] = np.bincount(np.minimum(steps, horizon), minlength=horizon + 1)[:horizon]
    return counts
