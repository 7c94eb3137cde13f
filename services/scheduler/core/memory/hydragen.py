"""Which running sequences share a prefix that is worth one attention pass for all of them (Juravsky et al. 2024,
"Hydragen: High-Throughput LLM Inference with Shared Prefixes")."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.memory.prefix_tree import ROOT

NO_GROUP = -1


@dataclass(frozen=True)
class HydragenPolicy:
    """When rows of a batch become a group. Costs are in KV tokens: the time one sequence's attention takes to read one
    more token of its own keys and values, in one layer. That makes the rule independent of the model.

    The constants come from one layer on an H200: 32 query and 8 KV heads of 64, bf16, 32 groups of 256 sequences, a
    prefix of 704 tokens (docs/performance.md). Prefixes: 0.16 ms. Own tokens, 110 each: 0.45 ms.

    * A KV token is 2 KiB at what the kernel for own tokens reads: 0.45 ms / (8,192 rows x 110 tokens) = 0.5 ns. What a
      row costs whatever its length is there with a group and without, and cancels.
    * ``row_cost``: a row's query read twice, what the prefix gave written and read, 12 KiB in all = 6 KV tokens; and
      twice that, since rows of a group also stand in a certain order.
    * ``group_cost``: the kernel works on tiles of 128 query rows, so 32 sequences at 4 query heads a KV head. A group
      fills its last tile up, and that is one tile too many at most: 0.16 ms / (32 groups x 8 tiles) = 0.6 us = 1,300 KV
      tokens. The work on full tiles is a twentieth of what it replaces, and neglected.
    * ``call_cost``: one more launch in every layer. One serves all groups, so this is charged once a step, against the
      gain of all of them: 5 us = 10,000 KV tokens.
    """

    min_group_size: int = 32  # rows
    min_prefix_len: int = 256  # tokens
    row_cost: int = 12  # KV tokens, as all costs
    group_cost: int = 1_300
    call_cost: int = 10_000  # per step

    def gain(self, rows: int, prefix: int) -> int:
        """KV tokens that a group of ``rows`` rows and ``prefix`` shared tokens saves: the prefix is read once instead
        of once a row. Not above 0 = the group does not pay. More rows or a longer prefix never make a group that pays
        stop paying: a prefix shorter than ``row_cost`` pays for no number of rows."""
        return (rows - 1) * prefix - self.group_cost - self.row_cost * rows


class Grouping(NamedTuple):
    """Groups by the node that a sequence hangs on, rows or no rows: who joins later knows its group."""

    of_node: np.ndarray  # int32 [nodes], -1 = none
    prefix_pages: np.ndarray  # int64 [groups], pages from the root on that all rows of the group share


def choose_groups(
    parent: np.ndarray, depth: np.ndarray, row_nodes: np.ndarray, page_size: int, policy: HydragenPolicy
) -> Grouping:
    """Greedy depth-first search over the prefix tree: the deepest nodes take their rows first.

    A node becomes a group when enough rows hang on it or below it that no deeper group took, its path is long enough,
    and the group pays. Other nodes' rows roll up to the parent. So a row's group is that of the first node with a
    group on its way to the root. No groups at all when together they do not pay for their attention call.

    ``parent`` int32 ``[nodes]`` (root: node 0, parent -1; a node is deeper than its parent), ``depth`` int32
    ``[nodes]`` (pages from the root through the node), ``row_nodes`` int64 ``[rows]``. Entries of nodes that are in
    the tree no longer may say anything, as long as following ``parent`` ends at the root.
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
    """Rows that hang on each node or below it: int64 ``[nodes]``; the root's entry means nothing.

    In round k a node knows its rows less than 2^k generations down, and gets those of the nodes exactly 2^k down: as
    many rounds as the logarithm of the tree's height, however long its chains are.
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
    """Nodes of the groups, ascending: int64 ``[groups]``. ``large``: nodes with enough rows, deepest first.

    A Python loop, but over nodes that share a long prefix among many rows: a few hundred at most in any real batch.
    """
    taken: dict[int, int] = {}  # rows below a node that are in a group already
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
    """Position in ``chosen`` of the first chosen node from each node upwards, -1 = none: int32 ``[nodes]``."""
    above = np.maximum(parent, ROOT)
    above[chosen] = chosen
    while True:  # pointers double: as many rounds as the logarithm of the tree's height
        further = above[above]
        if np.array_equal(further, above):
            break
        above = further
    group = np.full(len(parent), NO_GROUP, np.int32)
    group[chosen] = np.arange(len(chosen))
    return group[above]
