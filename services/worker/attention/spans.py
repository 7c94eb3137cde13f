"""Spans of query tokens that attend to the same pages, and their forms for kernels. Numpy arrays on the host."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Fields of a tile: first query token, number of query tokens, slot, bound of the first token, keys of the last token.
TILE_FIELDS = 5
# Maximum share of rows between groups to compute in addition to the rows in groups, instead of gathering the latter.
_MAX_GAP_SHARE = 1 / 8


@dataclass(frozen=True)
class Spans:
    """Ranges of query tokens, ascending and without overlap. All arrays are ``[spans]`` int32.

    Span i has the query tokens ``starts[i]`` to ``starts[i] + counts[i] - 1``.
    """

    starts: np.ndarray
    counts: np.ndarray  # at least 1
    slots: np.ndarray  # slots whose pages contain the keys
    contexts: np.ndarray  # number of keys; for chunks, the span's tokens are the last of them


class Pieces(NamedTuple):
    """Spans that are cut into pieces of at most some number of query tokens. All arrays are ``[pieces]``."""

    span: np.ndarray  # index of the piece's span
    number: np.ndarray  # of the piece within its span, from 0
    counts: np.ndarray  # query tokens


def cut(spans: Spans, tokens: int) -> Pieces:
    """Cut spans into pieces of at most ``tokens`` query tokens, in order."""
    pieces = -(-spans.counts // tokens)
    span, number = np.repeat(np.arange(len(pieces)), pieces), _within(pieces)
    return Pieces(span, number, np.minimum(spans.counts[span] - number * tokens, tokens))


def tiles(spans: Spans, tokens: int, *, causal: bool) -> np.ndarray:
    """Split spans into tiles of at most ``tokens`` query tokens, ``[tiles, TILE_FIELDS]`` int32.

    Tiles with the longest contexts come first. If ``causal``, token i of a tile attends to the first ``bound + i``
    tokens of the slot, otherwise to all ``keys``.
    """
    span, number, counts = cut(spans, tokens)
    done = number * tokens
    keys = bounds = spans.contexts[span]
    if causal:
        bounds = keys - spans.counts[span] + done + 1
        keys = bounds + counts - 1
    fields = np.stack((spans.starts[span] + done, counts, spans.slots[span], bounds, keys), axis=1)
    return fields[np.argsort(-keys, kind="stable")].astype(np.int32)


@dataclass(frozen=True)
class PageLists:
    """Page ids of all spans, concatenated."""

    pages: np.ndarray  # [offsets[-1]] int32
    offsets: np.ndarray  # [spans + 1] int32, start of each span's pages
    last_tokens: np.ndarray  # [spans] int32, tokens in the last page, 1 to page_size


def page_lists(spans: Spans, page_table: np.ndarray, page_size: int) -> PageLists:
    """Return the pages of ``spans``. ``page_table [max_slots, max_pages]`` is on the host."""
    counts = -(-spans.contexts // page_size)
    pages = page_table[np.repeat(spans.slots, counts), _within(counts)]
    last_tokens = spans.contexts - (counts - 1) * page_size
    return PageLists(pages.astype(np.int32), offsets(counts), last_tokens.astype(np.int32))


def offsets(counts: np.ndarray) -> np.ndarray:
    """Return 0 and the cumulative sums of ``counts [n]``, ``[n + 1]`` int32."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def packed(spans: Spans) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return the rows of all spans, and the start of each span among these rows, ``[spans + 1]`` int32.

    If there are few rows between spans, the rows are a slice, and rows between spans belong to the span before them.
    Otherwise they are indices, ``[rows]`` int64.
    """
    ends = spans.starts + spans.counts
    first, last, rows = int(spans.starts[0]), int(ends[-1]), int(spans.counts.sum())
    if last - first - rows <= rows * _MAX_GAP_SHARE:
        return slice(first, last), np.append(spans.starts - first, last - first).astype(np.int32)
    indices = np.repeat(spans.starts, spans.counts) + _within(spans.counts)
    return indices.astype(np.int64), offsets(spans.counts)


def _within(counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of ``arange(count)`` for each of ``counts``."""
    ends = np.cumsum(counts)
    within: np.ndarray = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return within
