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

    def copy(self) -> "NodeEnds":
        """Return a copy that can be changed."""
        other = object.__new__(NodeEnds)
        other._sizes, other._parent, other._ends = self._sizes, self._parent, self._ends.copy()
        return other

    def keep(self, nodes: list[int]) -> None:
        """Hold the paths of ``nodes`` without an end."""
        self._raise(np.array(nodes, np.int64), np.full(len(nodes), FAR))

    def hold(self, sequences: Sequences) -> None:
        """Hold the paths of ``sequences`` as long as these do."""
        self._raise(sequences.node, np.where(sequences.lent > 0, FAR, sequences.end))

    def _raise(self, nodes: np.ndarray, ends: np.ndarray) -> None:
        """Raise the ends of the paths of ``nodes`` to ``ends``, both int64 ``[sequences]``."""
        np.maximum.at(self._ends, nodes, ends)
        touched = np.zeros(len(self._ends), bool)
        while True:
            touched[nodes] = True
            touched[ROOT] = False
            nodes = np.flatnonzero(touched)
            if len(nodes) == 0:
                return
            touched[nodes] = False
            np.maximum.at(self._ends, self._parent[nodes], self._ends[nodes])
            nodes = self._parent[nodes]

    def in_use(self, horizon: int) -> npt.NDArray[np.int64]:
        """Return the pages in use at each step: int64 ``[horizon]``."""
        released = np.bincount(np.minimum(self._ends, horizon), weights=self._sizes, minlength=horizon + 1)
        released[0] = 0  # unused nodes, and the root
        return int(self._sizes[self._ends > 0].sum()) - np.cumsum(released[:horizon].astype(np.int64))


class PageEnds:
    """Ends of pages, if sequences leave the first pages of their paths behind."""

    def __init__(self, tree: PrefixTree, tables: np.ndarray, limits: WorkerLimits) -> None:
        """Hold no page. ``tables`` are the page tables of the slots, int32."""
        self._tree, self._tables, self._limits = tree, tables, limits
        self._ends = np.zeros(limits.page_count, np.int64)  # last end by page; 0 = not in use

    def copy(self) -> "PageEnds":
        """Return a copy that can be changed."""
        other = object.__new__(PageEnds)
        other._tree, other._tables, other._limits = self._tree, self._tables, self._limits
        other._ends = self._ends.copy()
        return other

    def keep(self, nodes: list[int]) -> None:
        """Hold the paths of ``nodes`` without an end."""
        for node in nodes:
            self._ends[self._tree.path(node)] = FAR

    def hold(self, sequences: Sequences) -> None:
        """Hold the paths of ``sequences`` as long as these do. The path of a candidate is not in a page table yet."""
        first, end = sequences.left_behind, np.minimum(self._tree.depth[sequences.node], sequences.pages)
        columns = np.arange(int(end.max(initial=0)))
        tables = self._tables[sequences.slot, : len(columns)]
        for row in np.flatnonzero(sequences.slot < 0).tolist():
            tables[row, : end[row]] = self._tree.path(int(sequences.node[row]))[: end[row]]
        held = (columns >= first[:, None]) & (columns < end[:, None])
        leaving, page = leaving_of(sequences, self._limits), columns[:, None]
        ends = np.where(sequences.lent > 0, FAR, sequences.end)
        until = np.where(page < leaving.end, leaving.step(page), ends).T
        np.maximum.at(self._ends, tables[held], until[held])

    def in_use(self, horizon: int) -> npt.NDArray[np.int64]:
        """Return the pages in use at each step: int64 ``[horizon]``."""
        held = self._ends[self._ends > 0]
        released = np.bincount(np.minimum(held, horizon), minlength=horizon + 1)
        return len(held) - np.cumsum(released[:horizon])
