"""Spans of query tokens that attend together, and the lists that kernels take them as. Plain numpy, on the host."""

from dataclasses import dataclass

import numpy as np

# Fields of a tile: first query token, query tokens, slot, bound of the first token, keys that any of them sees.
TILE_FIELDS = 5
# Rows between groups that may be computed for nothing, as a share of the rows in groups: cheaper than gathering.
_BRIDGED = 1 / 8


@dataclass(frozen=True)
class Spans:
    """Span i is query tokens ``starts[i]`` to ``starts[i] + counts[i] - 1``; ascending, without overlap.

    All are ``[spans]`` int32.
    """

    starts: np.ndarray
    counts: np.ndarray  # at least 1
    slots: np.ndarray  # whose pages hold the keys
    contexts: np.ndarray  # causal: the slot's tokens after this step, the span being the last; prefix: its tokens


def tiles(spans: Spans, tokens: int, *, causal: bool) -> np.ndarray:
    """The spans cut into tiles of at most ``tokens``: ``[tiles, TILE_FIELDS]`` int32, the longest contexts first.

    The tile's token i sees its slot's first ``bound + i`` tokens when causal, all ``keys`` otherwise.
    """
    pieces = -(-spans.counts // tokens)
    owner = np.repeat(np.arange(len(pieces)), pieces)
    done = _within(pieces) * tokens
    counts = np.minimum(spans.counts[owner] - done, tokens)
    keys = bounds = spans.contexts[owner]
    if causal:
        bounds = keys - spans.counts[owner] + done + 1
        keys = bounds + counts - 1
    made = np.stack((spans.starts[owner] + done, counts, spans.slots[owner], bounds, keys), axis=1)
    return made[np.argsort(-keys, kind="stable")].astype(np.int32)


@dataclass(frozen=True)
class PageLists:
    """Page ids of every span, one behind the other."""

    pages: np.ndarray  # [offsets[-1]] int32
    offsets: np.ndarray  # [spans + 1] int32, where each span's pages begin
    last_tokens: np.ndarray  # [spans] int32, tokens in the last page, 1 to page_size


def page_lists(spans: Spans, page_table: np.ndarray, page_size: int) -> PageLists:
    """``page_table [max_slots, max_pages]``: the host's."""
    counts = -(-spans.contexts // page_size)
    pages = page_table[np.repeat(spans.slots, counts), _within(counts)]
    last_tokens = spans.contexts - (counts - 1) * page_size
    return PageLists(pages.astype(np.int32), offsets(counts), last_tokens.astype(np.int32))


def offsets(counts: np.ndarray) -> np.ndarray:
    """``[n + 1]`` int32: 0 and the running sums of ``counts [n]``."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def packed(spans: Spans) -> tuple[slice | np.ndarray, np.ndarray]:
    """Which rows to take so that the spans lie one behind the other, and where each then begins, ``[spans + 1]`` int32.

    The rows are a slice where the spans leave few rows between them (those are then taken for the span before), and
    ``[rows]`` int64 indices otherwise.
    """
    ends = spans.starts + spans.counts
    first, last, rows = int(spans.starts[0]), int(ends[-1]), int(spans.counts.sum())
    if last - first - rows <= rows * _BRIDGED:
        return slice(first, last), np.append(spans.starts - first, last - first).astype(np.int32)
    indices = np.repeat(spans.starts, spans.counts) + _within(spans.counts)
    return indices.astype(np.int64), offsets(spans.counts)


def _within(counts: np.ndarray) -> np.ndarray:
    """0 to ``counts[i] - 1`` for each i, one behind the other."""
    ends = np.cumsum(counts)
    within: np.ndarray = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return within
