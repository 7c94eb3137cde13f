"""Groups running sequences that share a prefix, where one attention pass over the prefix saves time.

Source: Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes".
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.memory.prefix_tree import ROOT

NO_GROUP = -1


@dataclass(frozen=True)
class HydragenPolicy:
    """Rule for the groups of a batch.

    Costs are in KV tokens: the time in which attention reads one more token of a sequence's keys and values in one
    layer. So the rule does not depend on the model.

    The constants were measured for one layer on an H200: 32 query and 8 KV heads of 64, bf16, 32 groups of 256
    sequences, and a prefix of 704 tokens (docs/performance/kernels.md). The prefixes took 0.16 ms, and 110 own tokens
    of each sequence took 0.45 ms.

    * A KV token is 2 KiB, and takes 0.45 ms / (8,192 rows x 110 tokens) = 0.5 ns. The cost of a row that does not
      depend on its length is the same with and without a group, so it cancels.
    * ``row_cost``: the query of a row is read twice, and the result of its prefix is written and read. These are 12 KiB
      = 6 KV tokens. The value is twice that, because rows of a group must also be in order.
    * ``group_cost``: the kernel works on tiles of 128 query rows, that is 32 sequences with 4 query heads for each KV
      head. A group wastes at most one tile: 0.16 ms / (32 groups x 8 tiles) = 0.6 us = 1,300 KV tokens. The work on
      full tiles is a twentieth of the work that it replaces, and is neglected.
    * ``call_cost``: one more launch in every layer, which serves all groups. It is charged once for each step, against
      the gain of all groups: 5 us = 10,000 KV tokens.
    """

    min_group_size: int = 32  # rows
    min_prefix_len: int = 256  # tokens
    row_cost: int = 12  # KV tokens, as all costs
    group_cost: int = 1_300
    call_cost: int = 10_000  # per step

    def gain(self, rows: int, prefix: int) -> int:
        """Return the KV tokens that a group of ``rows`` rows with ``prefix`` shared tokens saves.

        The prefix is read once instead of once for each row. The gain of a useful group is above 0. More rows or a
        longer prefix never make a useful group useless. A prefix shorter than ``row_cost`` is never useful.
        """
        return (rows - 1) * prefix - self.group_cost - self.row_cost * rows


class Grouping(NamedTuple):
    """Groups by the node of a sequence. Nodes without sequences have a group too, for sequences that join later."""

    of_node: np.ndarray  # int32 [nodes], -1 = none
    prefix_pages: np.ndarray  # int64 [groups], leading pages that all rows of the group share


def choose_groups(
    parent: np.ndarray, depth: np.ndarray, row_nodes: np.ndarray, page_size: int, policy: HydragenPolicy
) -> Grouping:
    """Choose groups by a greedy search over the prefix tree, deepest nodes first.

    A node becomes a group if its path is long enough, and if enough rows at or below it are in no deeper group, so
    that the group saves time. Rows of other nodes count for the parent. So the group of a row is that of the first node
    with a group on its way to the root. There are no groups if together they save less than their attention call costs.

    ``parent`` is int32 ``[nodes]``: the root is node 0 with parent -1, and a node is deeper than its parent. ``depth``
    is int32 ``[nodes]``, the pages from the root through the node. ``row_nodes`` is int64 ``[rows]``. Entries of
    unused nodes may have any value for which following ``parent`` ends at the root.
    """
    min_pages = max(1, -(-policy.min_prefix_len // page_size))
    rows = _rows_below(parent, row_nodes)
    large = np.flatnonzero((rows >= max(1, policy.min_group_size)) & (depth >= min_pages))
    large = large[np.argsort(-depth[large], kind="stable")]
    chosen = _deepest_that_pay(large, parent, depth, rows, page_size, policy)
    if not len(chosen):
        return Grouping(np.full(len(parent), NO_GROUP, np.int32), np.zeros(0, np.int64))
    return Grouping(_nearest(parent, chosen), depth[chosen].astype(np.int64))


def _rows_below(parent: np.ndarray, row_nodes: np.ndarray) -> np.ndarray:
    """Return the number of rows at each node or below it: int64 ``[nodes]``. The entry of the root is undefined.

    Before round k a node has counted the rows less than 2^k generations down, and round k adds those of the nodes
    exactly 2^k generations down. So the number of rounds is the logarithm of the height of the tree.
    """
    rows = np.bincount(row_nodes, minlength=len(parent))
    above = np.maximum(parent, ROOT)
    while above.any():
        rows += np.bincount(above, weights=rows, minlength=len(parent)).astype(np.int64)
        above = above[above]
    return rows


def _deepest_that_pay(
    large: np.ndarray, parent: np.ndarray, depth: np.ndarray, rows: np.ndarray, page_size: int, policy: HydragenPolicy
) -> np.ndarray:
    """Return the nodes of the groups, ascending: int64 ``[groups]``.

    ``large`` are the nodes with enough rows, deepest first.

    The Python loop is short: a batch has at most a few hundred nodes with a long prefix and many rows.
    """
    taken: dict[int, int] = {}  # rows below a node that are in a group
    chosen, gain = [], 0
    columns = (large, parent[large], depth[large], rows[large])
    for node, above, pages, count in zip(*(column.tolist() for column in columns), strict=True):
        gone = taken.get(node, 0)
        if count - gone >= policy.min_group_size:
            saved = policy.gain(count - gone, pages * page_size)
            if saved > 0:
                chosen.append(node)
                gain, gone = gain + saved, count
        taken[above] = taken.get(above, 0) + gone
    return np.array(sorted(chosen) if gain > policy.call_cost else [], np.int64)


def _nearest(parent: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the index in ``chosen`` of the first chosen node from each node upwards: int32 ``[nodes]``, -1 = none."""
    above = np.maximum(parent, ROOT)
    above[chosen] = chosen
    while True:  # pointer doubling: the number of rounds is the logarithm of the height of the tree
        further = above[above]
        if np.array_equal(further, above):
            break
        above = further
    group = np.full(len(parent), NO_GROUP, np.int32)
    group[chosen] = np.arange(len(chosen))
    return group[above]
