"""Puts one step's rows in order: Hydragen groups together, micro-batches of equal work."""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NONE = np.zeros(0, np.int64)


class Arrangement(NamedTuple):
    """A batch in order. All arrays are int64."""

    slots: np.ndarray  # [rows]
    counts: np.ndarray  # [rows], tokens each row computes
    group_starts: np.ndarray  # [groups], first row
    group_counts: np.ndarray  # [groups], rows
    group_pages: np.ndarray  # [groups], leading pages that the rows share
    parts: np.ndarray  # [parts], rows of each micro-batch, 0 = it stays empty; no entries = the step is not cut


def arrange(
    decoding: np.ndarray,
    groups: np.ndarray,
    prefix_pages: np.ndarray,
    prefill_slots: np.ndarray,
    prefill_counts: np.ndarray,
    *,
    min_rows: int,
    parts: int,
) -> Arrangement:
    """Order the rows of a step and cut it into ``parts`` micro-batches.

    Each part holds whole groups or pieces of groups, then decoding rows of no group, then prefilling rows. Groups are
    in ascending order and their rows ascend by slot; other rows keep the order given. A group that a boundary cuts
    becomes one group in each part; a piece of fewer than ``min_rows`` rows is no group. The numbers of tokens of two
    parts differ by no more than the longest row (``_spread``).

    ``decoding`` int64 ``[d]`` (slots, one token each) beside ``groups`` int32 ``[d]`` (-1 = none); ``prefix_pages``
    int64 ``[groups]``; ``prefill_slots``, ``prefill_counts`` int64 ``[p]``.
    """
    slots = np.concatenate((decoding, prefill_slots))
    counts = np.ones(len(slots), np.int64)
    counts[len(decoding) :] = prefill_counts
    grouped = groups >= 0
    if parts == 1 and not grouped.any():
        return Arrangement(slots, counts, NONE, NONE, NONE, NONE)

    # Within a part rows sort by kind: the group's number, then `alone`, then `prefilling`.
    alone, prefilling = len(prefix_pages), len(prefix_pages) + 1
    kinds = np.full(len(slots), prefilling, np.int64)
    kinds[: len(decoding)] = np.where(grouped, groups, alone)
    order = _by_group(decoding, kinds[: len(decoding)], alone)
    part = np.zeros(len(slots), np.int64)
    if parts > 1:
        part[order], part[len(decoding) :] = _spread(len(decoding), prefill_counts, parts)
    base = part * (prefilling + 1)
    rows_of_piece = np.bincount(base + kinds, minlength=parts * (prefilling + 1))
    kinds[(kinds < alone) & (rows_of_piece[base + kinds] < min_rows)] = alone

    # The sort is stable, and `order` has the rows of each kind in their order already.
    order = np.concatenate((order, np.arange(len(decoding), len(slots))))
    order = order[_stable_order((base + kinds)[order])]
    pieces = (base + kinds)[order]
    starts = np.flatnonzero(np.diff(pieces, prepend=-1))
    lengths = np.diff(starts, append=len(pieces))
    kind = pieces[starts] % (prefilling + 1)
    shared = kind < alone
    cut = np.bincount(part, minlength=parts) if parts > 1 else NONE
    return Arrangement(slots[order], counts[order], starts[shared], lengths[shared], prefix_pages[kind[shared]], cut)


def _by_group(decoding: np.ndarray, kinds: np.ndarray, alone: int) -> np.ndarray:
    """Positions of the decoding rows by group, the rows of a group by slot: int64 ``[d]``."""
    if (decoding[1:] > decoding[:-1]).all():  # as `Slots.decoding` gives them
        return _stable_order(kinds)
    return np.lexsort((np.where(kinds < alone, decoding, 0), kinds))


def _stable_order(keys: np.ndarray) -> np.ndarray:
    """Stable argsort of keys that are not negative; numpy sorts 16 bits by radix, ten times as fast as 64."""
    small = not len(keys) or keys.max() <= np.iinfo(np.uint16).max
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def _spread(decoding: int, prefill_counts: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Parts of the decoding rows (int64 ``[d]``, ascending) and of the prefilling rows (int64 ``[p]``).

    Rows of several tokens go to the lightest part, the longest first (Graham 1969). Rows of one token, which are all
    alike, then fill the parts up to one level, as if each went to the lightest part too. A row put into the lightest
    part never makes two parts differ by more than the longest row so far, so in the end they do not either.
    """
    prefill_parts = np.zeros(len(prefill_counts), np.int64)
    lightest = [(0, part) for part in range(parts)]
    long = np.flatnonzero(prefill_counts > 1)
    long = long[np.argsort(-prefill_counts[long], kind="stable")]
    for row, count in zip(long.tolist(), prefill_counts[long].tolist(), strict=True):
        load, part = lightest[0]
        prefill_parts[row] = part
        heapq.heapreplace(lightest, (load + count, part))
    loads = np.zeros(parts, np.int64)
    for load, part in lightest:
        loads[part] = load

    short = np.flatnonzero(prefill_counts == 1)
    room = _fill(loads, decoding + len(short))
    fill = np.repeat(np.arange(parts), room)
    prefill_parts[short] = fill[decoding:]
    return fill[:decoding], prefill_parts


def _fill(loads: npt.NDArray[np.int64], units: int) -> npt.NDArray[np.int64]:
    """How many of ``units`` tokens each part gets when they go to the lightest part one by one: int64 ``[parts]``."""
    low = np.sort(loads)
    levels = (units + np.cumsum(low)) // np.arange(1, len(low) + 1)  # if the units go to the 1, 2... lightest parts
    reached = np.append(low[1:] > levels[:-1], True)
    level = levels[reached.argmax()]
    room: npt.NDArray[np.int64] = np.maximum(level - loads, 0)
    open_parts = np.flatnonzero(loads <= level)
    room[open_parts[: units - room.sum()]] += 1
    return room
