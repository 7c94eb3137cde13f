"""Kernel for attention of many query tokens to the pages of one slot: chunks of prompts, and shared prefixes.

It is limited by arithmetic. A program computes a tile of tokens with all query heads of one kv head, so that its matrix
products are large.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from services.worker.attention.base import LayerAttention
from services.worker.attention.spans import TILE_FIELDS, Spans, tiles
from services.worker.attention.triton_decode import LOG2_E, add_sinks, as_dtype, score_factors, soft_capped


class SpanOptions(NamedTuple):
    """Tile sizes and launch options of the kernel."""

    rows: int  # query tokens times query heads per kv head in a tile, a power of two
    keys: int  # keys per iteration, a power of two
    warps: int
    stages: int  # pipeline stages


def span_options(head_dim: int, dtype: torch.dtype) -> SpanOptions:
    """Return options for which a tile fits the registers."""
    if dtype == torch.float32:
        return SpanOptions(32, 32, 4, 1)
    if head_dim > 128:
        return SpanOptions(128, 32, 8, 2)
    return SpanOptions(128, 64, 8, 3) if head_dim <= 64 else SpanOptions(128, 64, 8, 2)


@triton.jit
def _accumulate(
    sums, peak, total, query, keys, values, table, head_offset, dims, oldest, firsts, bounds, begin, end, scale,
    PAGE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Return the state of the softmax after keys ``begin`` to ``end - 1``.

    Without ``MASKED``, all rows attend to all of these keys, which fill whole tiles. With ``MASKED``, a row attends to
    keys before its bound, and with ``WINDOWED`` only to keys from its first on. Keys before ``oldest``, the least of
    these, are not read: their pages may be those of other sequences.
    """
    for start in range(begin, end, KEYS):
        tokens = start + tl.arange(0, KEYS)
        if MASKED:
            inside = tokens < end
            if WINDOWED:
                inside = inside & (tokens >= oldest)
            pages = tl.load(table + tokens // PAGE, inside, other=0).to(tl.int64)
        else:
            pages = tl.load(table + tokens // PAGE).to(tl.int64)
        tile = (pages * PAGE_STRIDE + (head_offset + (tokens % PAGE) * HEAD_DIM))[:, None] + dims[None, :]
        if MASKED:
            key = tl.load(keys + tile, inside[:, None], other=0.0)
            value = tl.load(values + tile, inside[:, None], other=0.0)
        else:
            key = tl.load(keys + tile)
            value = tl.load(values + tile)
        scores = tl.dot(query, tl.trans(as_dtype(key, query.dtype)), input_precision="ieee") * scale
        if SOFT_CAP is not None:
            scores = soft_capped(scores, SOFT_CAP)
        if MASKED:
            visible = (tokens[None, :] < bounds[:, None]) & inside[None, :]
            if WINDOWED:
                visible = visible & (tokens[None, :] >= firsts[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        correction = tl.exp2(peak - higher)
        total = total * correction + tl.sum(weights, axis=1)
        value = as_dtype(value, query.dtype)
        sums = tl.dot(weights.to(value.dtype), value, sums * correction[:, None], input_precision="ieee")
        peak = higher
    return sums, peak, total


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend(
    queries,
    keys,
    values,
    tiles,
    page_table,
    sinks,
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
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Attend for each tile and kv head. Grid: ``(tiles * kv_heads,)``.

    With ``WINDOWED``, which needs ``CAUSAL``, each token attends to its last ``window`` tokens. ``scale`` and
    ``SOFT_CAP`` are ``ScoreFactors``. With ``SINKS``, ``sinks [heads]`` take part in the softmax of each token.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    fields = tiles + (tl.program_id(0) // KV_HEADS) * FIELDS
    head = tl.program_id(0) % KV_HEADS
    first, count, slot = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    bound, end = tl.load(fields + 3), tl.load(fields + 4)

    packed = tl.arange(0, ROWS)
    token, member = packed // GROUP_PADDED, packed % GROUP_PADDED
    inside = (token < count) & (member < GROUP)
    head_rows = (first + token).to(tl.int64) * HEADS + head * GROUP + member
    dims = tl.arange(0, HEAD_DIM)
    query = tl.load(queries + head_rows[:, None] * HEAD_DIM + dims[None, :], inside[:, None], other=0.0)
    # With a window, a row may attend to no key of the first tile. A finite start avoids inf - inf, which is NaN.
    peak = tl.full((ROWS,), -1e30 if WINDOWED else float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, HEAD_DIM), tl.float32)

    table = page_table + slot.to(tl.int64) * table_stride
    head_offset = head * (PAGE * HEAD_DIM)
    bounds = bound + token if CAUSAL else bound + token * 0
    firsts = bounds
    oldest = 0
    begin = 0
    whole = bound // KEYS * KEYS
    if WINDOWED:
        # Keys between the first key of the first token and that of the last token are outside of some rows' windows.
        firsts = tl.maximum(bounds - window, 0)
        oldest = tl.maximum(bound - window, 0)
        start = oldest // KEYS * KEYS
        begin = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, whole)
        sums, peak, total = _accumulate(
            sums, peak, total, query, keys, values, table, head_offset, dims, oldest, firsts, bounds, start, begin,
            scale, PAGE_STRIDE, HEAD_DIM, PAGE, KEYS, True, True, SOFT_CAP,
        )  # fmt: skip
    sums, peak, total = _accumulate(
        sums, peak, total, query, keys, values, table, head_offset, dims, oldest, firsts, bounds, begin, whole, scale,
        PAGE_STRIDE, HEAD_DIM, PAGE, KEYS, False, WINDOWED, SOFT_CAP,
    )  # fmt: skip
    sums, peak, total = _accumulate(
        sums, peak, total, query, keys, values, table, head_offset, dims, oldest, firsts, bounds, whole, end, scale,
        PAGE_STRIDE, HEAD_DIM, PAGE, KEYS, True, WINDOWED, SOFT_CAP,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head * GROUP + member, inside, other=float("-inf")).to(tl.float32) * LOG2_E
        sums, peak, total = add_sinks(sums, peak, total, sink)
    result = (sums / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + head_rows[:, None] * HEAD_DIM + dims[None, :], result, inside[:, None])
    if LSE:
        tl.store(lse + head_rows, peak + tl.log2(total), inside)


class PlannedTiles(NamedTuple):
    """Spans of a step, as tiles for the kernel."""

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
        rules: LayerAttention,
    ) -> None:
        """Attend, and write the rows of the spans to ``output`` and their log-sum-exp, base 2, to ``lse``.

        ``queries`` and ``output [tokens, heads, head_dim]``, and ``keys`` and ``values [page_count, kv_heads,
        page_size, head_dim]`` are contiguous and of one dtype, or keys and values are fp8. ``lse`` is ``[tokens,
        heads]`` float32. A window needs causal spans.
        """
        _, heads, head_dim = queries.shape
        _, kv_heads, page_size, _ = keys.shape
        options, sinks, factors = self.options, rules.sinks, score_factors(rules)
        _attend[(len(self.tiles) * kv_heads,)](
            queries, keys, values, self.tiles, self.page_table, queries if sinks is None else sinks, output,
            output if lse is None else lse, self.page_table.stride(0), rules.window or 0, factors.scale, HEADS=heads,
            KV_HEADS=kv_heads, GROUP_PADDED=triton.next_power_of_2(heads // kv_heads), HEAD_DIM=head_dim,
            PAGE=page_size, ROWS=options.rows, KEYS=options.keys, FIELDS=TILE_FIELDS, CAUSAL=self.causal,
            WINDOWED=rules.window is not None, SOFT_CAP=factors.soft_cap, SINKS=sinks is not None,
            LSE=lse is not None, num_warps=options.warps, num_stages=options.stages,
        )  # fmt: skip


class TritonSpans:
    """Attention of spans by the Triton kernel, with ``group`` query heads per kv head."""

    def __init__(self, group: int, head_dim: int, dtype: torch.dtype, *, causal: bool) -> None:
        self.options = span_options(head_dim, dtype)
        self._causal, self.tile_tokens = causal, self.options.rows // triton.next_power_of_2(group)

    def plan(
        self,
        spans: Spans,
        page_table: torch.Tensor,
        host_page_table: np.ndarray | None,
        put: Callable[[np.ndarray], torch.Tensor],
    ) -> PlannedTiles:
        """Plan ``spans``. ``put`` copies an array to the device. ``host_page_table`` is not used."""
        return self.planned(put(self.tiles(spans)), page_table)

    def tiles(self, spans: Spans) -> np.ndarray:
        """Return the tiles of ``spans``, ``[tiles, TILE_FIELDS]`` int32. A tile of zeros has no effect."""
        return tiles(spans, self.tile_tokens, causal=self._causal)

    def planned(self, tiles: torch.Tensor, page_table: torch.Tensor) -> PlannedTiles:
        """Return the plan for ``tiles`` on the device."""
        return PlannedTiles(tiles, page_table, self._causal, self.options)
