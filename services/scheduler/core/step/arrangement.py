"""Orders the rows of a step: rows of a Hydragen group together, and micro-batches of equal work."""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import NO_SLOTS


class Arrangement(NamedTuple):
    """The rows of a step in order. All arrays are int64."""

    slots: np.ndarray  # [rows]
    counts: np.ndarray  # [rows], tokens that each row computes
    group_starts: np.ndarray  # [groups], first row
    group_counts: np.ndarray  # [groups], rows
    group_pages: np.ndarray  # [groups], leading pages that all rows of the group share
    micro_batch_rows: np.ndarray  # [micro-batches], rows of each; empty if there is only one micro-batch


def arrange(
    decoding: np.ndarray,
    groups: np.ndarray,
    prefix_pages: np.ndarray,
    prefill_slots: np.ndarray,
    prefill_counts: np.ndarray,
    *,
    min_rows: int,
    micro_batches: int,
) -> Arrangement:
    """Order the rows of a step and divide them into ``micro_batches``.

    A micro-batch has the rows of groups first, then the other decoding rows, then the prefilling rows. Groups are in
    ascending order, and the rows of a group ascend by slot. Other rows keep their order. A group that is divided
    becomes a group in each micro-batch, but rows of a piece smaller than ``min_rows`` are in no group. The tokens of
    two micro-batches differ by at most those of the longest row (``_spread``).

    ``decoding`` int64 ``[d]`` are slots that compute one token. ``groups`` int32 ``[d]`` are their groups, -1 = none.
    ``prefix_pages`` is int64 ``[groups]``. ``prefill_slots`` and ``prefill_counts`` are int64 ``[p]``.
    """
    slots = np.concatenate((decoding, prefill_slots))
    counts = np.ones(len(slots), np.int64)
    counts[len(decoding) :] = prefill_counts
    grouped = groups >= 0
    if micro_batches == 1 and not grouped.any():
        return Arrangement(slots, counts, NO_SLOTS, NO_SLOTS, NO_SLOTS, NO_SLOTS)

    # Rows of a micro-batch are sorted by kind: the number of the group, then ``alone``, then ``prefilling``.
    alone, prefilling = len(prefix_pages), len(prefix_pages) + 1
    kinds = np.full(len(slots), prefilling, np.int64)
    kinds[: len(decoding)] = np.where(grouped, groups, alone)
    order = _by_group(decoding, kinds[: len(decoding)], alone)
    micro_batch = np.zeros(len(slots), np.int64)  # of each row
    if micro_batches > 1:
        micro_batch[order], micro_batch[len(decoding) :] = _spread(len(decoding), prefill_counts, micro_batches)
    base = micro_batch * (prefilling + 1)
    rows_of_piece = np.bincount(base + kinds, minlength=micro_batches * (prefilling + 1))
    kinds[(kinds < alone) & (rows_of_piece[base + kinds] < min_rows)] = alone

    # The sort is stable, and in ``order`` the rows of each kind are in order.
    order = np.concatenate((order, np.arange(len(decoding), len(slots))))
    order = order[_stable_order((base + kinds)[order])]
    pieces = (base + kinds)[order]
    starts = np.flatnonzero(np.diff(pieces, prepend=-1))
    lengths = np.diff(starts, append=len(pieces))
    kind = pieces[starts] % (prefilling + 1)
    shared = kind < alone
    rows = np.bincount(micro_batch, minlength=micro_batches) if micro_batches > 1 else NO_SLOTS
    return Arrangement(slots[order], counts[order], starts[shared], lengths[shared], prefix_pages[kind[shared]], rows)


def _by_group(decoding: np.ndarray, kinds: np.ndarray, alone: int) -> np.ndarray:
    """Return the decoding rows in the order of their groups, and within a group by slot: int64 ``[d]``."""
    if (decoding[1:] > decoding[:-1]).all():  # the order of ``Slots.decoding``
        return _stable_order(kinds)
    return np.lexsort((np.where(kinds < alone, decoding, 0), kinds))


def _stable_order(keys: np.ndarray) -> np.ndarray:
    """Return a stable argsort of keys >= 0. For 16 bits, numpy uses radix sort, which is ten times as fast."""
    small = not len(keys) or keys.max() <= np.iinfo(np.uint16).max
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def _spread(decoding: int, prefill_counts: np.ndarray, micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the micro-batches of the decoding rows (int64 ``[d]``, ascending) and prefilling rows (int64 ``[p]``).

    Rows of several tokens go to the micro-batch with the fewest tokens, longest row first (Graham 1969). Then rows of
    one token fill the micro-batches to one level, which is the same as adding each to the one with the fewest tokens.
    Such an addition never makes two micro-batches differ by more than the longest row.
    """
    of_prefill = np.zeros(len(prefill_counts), np.int64)
    lightest = [(0, micro_batch) for micro_batch in range(micro_batches)]
    long = np.flatnonzero(prefill_counts > 1)
    long = long[np.argsort(-prefill_counts[long], kind="stable")]
    for row, count in zip(long.tolist(), prefill_counts[long].tolist(), strict=True):
        load, micro_batch = lightest[0]
        of_prefill[row] = micro_batch
        heapq.heapreplace(lightest, (load + count, micro_batch))
    loads = np.zeros(micro_batches, np.int64)
    for load, micro_batch in lightest:
        loads[micro_batch] = load

    short = np.flatnonzero(prefill_counts == 1)
    room = _fill(loads, decoding + len(short))
    fill = np.repeat(np.arange(micro_batches), room)
    of_prefill[short] = fill[decoding:]
    return fill[:decoding], of_prefill


def _fill(loads: npt.NDArray[np.int64], units: int) -> npt.NDArray[np.int64]:
    """Return the tokens that each micro-batch gets if ``units`` tokens go to the lowest load one by one: int64."""
    low = np.sort(loads)
    levels = (units + np.cumsum(low)) // np.arange(1, len(low) + 1)  # if the lowest 1, 2, ... loads get all units
    reached = np.append(low[1:] > levels[:-1], True)
    level = levels[reached.argmax()]
    room: npt.NDArray[np.int64] = np.maximum(level - loads, 0)
    at_level = np.flatnonzero(loads <= level)
    room[at_level[: units - room.sum()]] += 1
    return room
