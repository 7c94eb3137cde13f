"""The exact number of pages in use at every future step, given the lengths of all sequences.

A sequence that decodes computes one token in every step, so its future is known: it takes a page whenever its length
passes a multiple of the page size, and releases all pages at its end. A page of the prefix tree is in use until the
last sequence that holds it ends. Steps count from the plan that is being built: entry 0 is that plan.

If every layer has a window, a sequence also releases a page when its window has left the page behind: in the first plan
whose tokens do not attend to it. With the lengths, these steps are known too.

A prompt that takes several steps is computed earlier if other sequences finish and leave it more of each step. Such a
sequence is assumed to grow from its earliest start. Its pages are assumed to be in use until its latest end, and until
its window leaves them behind after its latest start. So the forecast is never less than its actual use. At most one
sequence of each key is in that state.
"""

import numpy as np
import numpy.typing as npt

from services.common.plan.types import WorkerLimits
from services.scheduler.core.future.sequences import Sequences, growth, leaving_of
from services.scheduler.core.future.tree_pages import NodeEnds, PageEnds
from services.scheduler.core.memory.prefix_tree import PrefixTree
from services.scheduler.core.memory.slots import Slots


class Forecast:
    """Pages in use by the running sequences, ``curve``, and with candidates added. Changes no state."""

    def __init__(
        self,
        limits: WorkerLimits,
        slots: Slots,
        tree: PrefixTree,
        running: Sequences,
        lasting: list[int],
        extra: int,
        horizon: int,
    ) -> None:
        """Make the forecast of ``running`` for ``horizon`` steps.

        ``lasting`` are nodes that are held without an end, and ``extra`` is the number of such pages outside the tree.
        """
        self.horizon = horizon
        self._limits = limits
        self._depth = tree.depth[: tree.top]
        self._own = self._own_pages(running) + extra
        self._tree: NodeEnds | PageEnds = (
            PageEnds(tree, slots.table, limits) if limits.window_tokens else NodeEnds(tree)
        )
        self._tree.keep(lasting)
        self._tree.hold(running)
        self.curve = self._own + self._tree.in_use(horizon)

    def with_candidates(self, candidates: Sequences) -> npt.NDArray[np.int64]:
        """Return the pages in use at steps 0 to ``horizon`` - 1 if ``candidates`` are admitted now: int64."""
        return self._own + self._own_pages(candidates) + self._tree.in_use_with(candidates, self.horizon)

    def _own_pages(self, sequences: Sequences) -> npt.NDArray[np.int64]:
        """Return the pages in use outside the prefix tree at each step: int64 ``[horizon]``."""
        horizon, depth = self.horizon, self._depth[sequences.node]
        first, count = growth(sequences, self._limits.page_size)
        begin = np.maximum(depth, sequences.left_behind)  # its own pages at step 0 are from here on
        held = sequences.pages - begin
        released = sequences.pages - np.maximum(begin, sequences.lent) + count
        taken = self._every_page(first, count)
        if self._limits.window_tokens:
            leaving = leaving_of(sequences, self._limits)
            end = np.maximum(leaving.end, begin)
            # Pages that the window has passed at the first token are released together, then one after the other.
            together = np.minimum(np.maximum(leaving.at_once, begin), end)
            at_once = np.bincount(np.minimum(leaving.first, horizon), weights=together - begin, minlength=horizon + 1)
            taken -= np.cumsum(at_once[:horizon].astype(np.int64)) + self._every_page(
                leaving.step(together), end - together
            )
            released -= end - begin
        at_end = np.bincount(np.clip(sequences.end, 0, horizon), weights=released, minlength=horizon + 1)
        return int(held.sum()) + taken - np.cumsum(at_end[:horizon].astype(np.int64))

    def _every_page(self, first: np.ndarray, count: np.ndarray) -> npt.NDArray[np.int64]:
        """Return the number of events until each step, int64 ``[horizon]``.

        A sequence has ``count[i]`` events, the first at step ``first[i]`` and then one every ``page_size`` steps.
        """
        page_size, horizon = self._limits.page_size, self.horizon
        # Time as a table with ``page_size`` columns. The events of a sequence stay in one column: +1 at the first and
        # -1 after the last, summed over the rows.
        rows = horizon // page_size + 2
        row, column = np.divmod(first, page_size)
        begin = np.minimum(row, rows - 1) * page_size + column
        behind = np.minimum(row + count, rows - 1) * page_size + column
        starts = np.bincount(begin, minlength=rows * page_size) - np.bincount(behind, minlength=rows * page_size)
        events = np.cumsum(starts.reshape(rows, page_size), axis=0).ravel()[:horizon]
        total: npt.NDArray[np.int64] = np.cumsum(events)
        return total
