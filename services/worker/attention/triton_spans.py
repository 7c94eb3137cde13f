"""Attention of many query tokens to one slot's pages: chunks of prompts, and shared prefixes. Bound by arithmetic.

A program takes a tile of tokens times the query heads of one kv head, so that its matrix products are large.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from services.worker.attention.spans import TILE_FIELDS, Spans, tiles
from services.worker.attention.triton_decode import as_dtype

_LOG2_E = 1.4426950408889634


class SpanOptions(NamedTuple):
    """How the kernel is built."""

    rows: int  # query tokens times query heads of a kv head in a tile, a power of two
    keys: int  # keys read at once, a power of two
    warps: int
    stages: int  # tiles of keys in flight


def span_options(head_dim: int, dtype: torch.dtype) -> SpanOptions:
    """A choice that fits the registers."""
    if dtype == torch.float32:
        return SpanOptions(32, 32, 4, 1)
    return SpanOptions(128, 64, 8, 3) if head_dim <= 64 else SpanOptions(128, 64, 8, 2)


@triton.jit
def _go_through(
    sums, peak, total, query, keys, values, table, head_place, dims, firsts, bounds, begin, end, scale,
    PAGE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return the softmax's state after keys ``begin`` to ``end - 1``. Unless ``MASKED``, every row sees all of them and
    they fill whole tiles; else a row sees those before its bound and, if ``WINDOWED``, from its first on."""
    for start in range(begin, end, KEYS):
        tokens = start + tl.arange(0, KEYS)
        if MASKED:
            inside = tokens < end
            pages = tl.load(table + tokens // PAGE, inside, other=0).to(tl.int64)
        else:
            pages = tl.load(table + tokens // PAGE).to(tl.int64)
        tile = (pages * PAGE_STRIDE + (head_place + (tokens % PAGE) * HEAD_DIM))[:, None] + dims[None, :]
        if MASKED:
            key = tl.load(keys + tile, inside[:, None], other=0.0)
            value = tl.load(values + tile, inside[:, None], other=0.0)
        else:
            key = tl.load(keys + tile)
            value = tl.load(values + tile)
        scores = tl.dot(query, tl.trans(as_dtype(key, query.dtype)), input_precision="ieee") * scale
        if MASKED:
            seen = (tokens[None, :] < bounds[:, None]) & inside[None, :]
            if WINDOWED:
                seen = seen & (tokens[None, :] >= firsts[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        value = as_dtype(value, query.dtype)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
        peak = higher
    return sums, peak, total


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend(
    queries,
    keys,
    values,
    tiles,
    page_table,
    output,
    lse,
    table_stride,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    LSE: tl.constexpr,
):
    """Grid ``(tiles * kv_heads,)``. ``WINDOWED``, of causal tiles: each token attends to its last ``window`` tokens."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    fields = tiles + (tl.program_id(0) // KV_HEADS) * FIELDS
    head = tl.program_id(0) % KV_HEADS
    first, count, slot = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    bound, end = tl.load(fields + 3), tl.load(fields + 4)

    packed = tl.arange(0, ROWS)
    token, member = packed // GROUP_PADDED, packed % GROUP_PADDED
    inside = (token < count) & (member < GROUP)
    places = (first + token).to(tl.int64) * HEADS + head * GROUP + member
    dims = tl.arange(0, HEAD_DIM)
    query = tl.load(queries + places[:, None] * HEAD_DIM + dims[None, :], inside[:, None], other=0.0)
    # In a window, a row may see no key of the first tile, and the difference of two infinities is no number.
    peak = tl.full((ROWS,), -1e30 if WINDOWED else float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, HEAD_DIM), tl.float32)

    table = page_table + slot.to(tl.int64) * table_stride
    head_place = head * (PAGE * HEAD_DIM)
    bounds = bound + token if CAUSAL else bound + token * 0
    firsts = bounds
    begin = 0
    whole = bound // KEYS * KEYS
    if WINDOWED:
        # Keys from the first token's first to the last token's first are seen by some rows only.
        firsts = tl.maximum(bounds - window, 0)
        start = tl.maximum(bound - window, 0) // KEYS * KEYS
        begin = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, whole)
        sums, peak, total = _go_through(
            sums, peak, total, query, keys, values, table, head_place, dims, firsts, bounds, start, begin, scale,
            PAGE_STRIDE, HEAD_DIM, PAGE, KEYS, True, True,
        )  # fmt: skip
    sums, peak, total = _go_through(
        sums, peak, total, query, keys, values, table, head_place, dims, firsts, bounds, begin, whole, scale,
        PAGE_STRIDE, HEAD_DIM, PAGE, KEYS, False, WINDOWED,
    )  # fmt: skip
    sums, peak, total = _go_through(
        sums, peak, total, query, keys, values, table, head_place, dims, firsts, bounds, whole, end, scale,
        PAGE_STRIDE, HEAD_DIM, PAGE, KEYS, True, WINDOWED,
    )  # fmt: skip
    result = (sums / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], result, inside[:, None])
    if LSE:
        tl.store(lse + places, peak + tl.log2(total), inside)


class PlannedTiles(NamedTuple):
    """Spans as the kernel takes them."""

    tiles: torch.Tensor  # [tiles, TILE_FIELDS] int32
    page_table: torch.Tensor  # [max_slots, max_pages] int32
    causal: bool
    options: SpanOptions

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        window: int | None = None,
    ) -> None:
        """Attend into the spans' rows of ``output`` and, base 2, of ``lse [tokens, heads]`` float32. With a ``window``,
        which only causal spans may have, each token attends to its last ``window`` tokens.

        ``queries`` and ``output [tokens, heads, head_dim]``, ``keys`` and ``values [page_count, kv_heads, page_size,
        head_dim]``, contiguous and of one dtype, or keys and values of fp8.
        """
        _, heads, head_dim = queries.shape
        _, kv_heads, page_size, _ = keys.shape
        options = self.options
        _attend[(len(self.tiles) * kv_heads,)](
            queries, keys, values, self.tiles, self.page_table, output, output if lse is None else lse,
            self.page_table.stride(0), window or 0, _LOG2_E / head_dim**0.5, HEADS=heads, KV_HEADS=kv_heads,
            GROUP_PADDED=triton.next_power_of_2(heads // kv_heads), HEAD_DIM=head_dim, PAGE=page_size,
            ROWS=options.rows, KEYS=options.keys, FIELDS=TILE_FIELDS, CAUSAL=self.causal,
            WINDOWED=window is not None, LSE=lse is not None, num_warps=options.warps, num_stages=options.stages,
        )  # fmt: skip


class TritonSpans:
    """For ``group`` query heads to a kv head; any step."""

    def __init__(self, group: int, head_dim: int, dtype: torch.dtype, *, causal: bool) -> None:
        self.options = span_options(head_dim, dtype)
        self._group, self._causal = triton.next_power_of_2(group), causal

    def plan(
        self,
        spans: Spans,
        page_table: torch.Tensor,
        host_page_table: np.ndarray | None,
        put: Callable[[np.ndarray], torch.Tensor],
    ) -> PlannedTiles:
        """``put`` takes an array to the device; the host's page table is not looked at."""
        return self.planned(put(self.tiles(spans)), page_table)

    def count(self, spans: Spans) -> int:
        """How many ``tiles`` there are."""
        return int((-(-spans.counts // (self.options.rows // self._group))).sum())

    def tiles(self, spans: Spans) -> np.ndarray:
        """``[tiles, TILE_FIELDS]`` int32: one program for each and kv head. A tile of zeros does nothing."""
        return tiles(spans, self.options.rows // self._group, causal=self._causal)

    def planned(self, tiles: torch.Tensor, page_table: torch.Tensor) -> PlannedTiles:
        """``tiles`` on the device."""
        return PlannedTiles(tiles, page_table, self._causal, self.options)
