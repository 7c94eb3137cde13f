"""Kernel for attention of decode rows, which have one token each, over their pages.

It is limited by memory bandwidth, so it keeps many bytes in flight and runs few instructions per byte. A program
computes all query heads of one kv head of one row, so that keys and values are read once. Tokens are the long side of
both products, ``keys x queries`` and ``values transposed x weights``, so that a group of four queries is padded to 8
instead of 16. Keys and values in fp8 are multiplied as float16, which represents them exactly, and represents weights
of at most 1 more precisely than bfloat16. Softmax and log-sum-exp use base 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from services.worker.attention.base import LayerAttention
from services.worker.layers.fp8 import FP8

_LOG2_E = 1.4426950408889634
LOG2_E = tl.constexpr(_LOG2_E)  # for kernels
_SMALLEST_COLUMNS = 8  # columns of a matrix product
# Triton's interpreter does not support inline assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
MAX_SPLITS = 32
# Contexts of up to this number of tokens are not split, because the second kernel costs more than it saves.
_MAX_UNSPLIT = 256
_SMALLEST_SPLIT = 64  # tokens
# From this context in tokens on, the longest row determines the time of a step, whatever the number of rows.
LONG_CONTEXT = 4096
_BUSY_PROGRAMS = 256  # with this number of programs, all multiprocessors are busy without splits
_FEW_PROGRAMS = 1024  # limit of programs with latency options, and of programs after splitting
_LONG_PROGRAMS = 8192  # limit of programs after splitting long contexts


class ScoreFactors(NamedTuple):
    """Constants of kernels, with which they turn products of queries and keys into scores to base 2."""

    scale: float  # factor of the products
    soft_cap: float | None  # of the scores


def score_factors(rules: LayerAttention) -> ScoreFactors:
    """Return the factors of a layer. With a soft cap, ``scale`` is for ``soft_capped``."""
    if rules.soft_cap is None:
        return ScoreFactors(rules.scale * _LOG2_E, None)
    return ScoreFactors(rules.scale / rules.soft_cap * 2 * _LOG2_E, rules.soft_cap * _LOG2_E)


class DecodeOptions(NamedTuple):
    """Tile size and launch options of the kernel."""

    tile: int  # tokens per iteration, a power of two, at least 16
    warps: int
    stages: int  # pipeline stages


class PrefixState(NamedTuple):
    """Results of attention over shared prefixes, with which decode rows start."""

    tokens: torch.Tensor  # [rows] int32, multiples of page_size; 0 = no prefix, and the other tensors are not read
    output: torch.Tensor  # [rows, heads, head_dim]
    lse: torch.Tensor  # [rows, heads] float32, base 2


# Options for high throughput, for heads of up to 64 dimensions, of up to 128, and for larger heads. On an H200 with
# 110 or more tokens per row, a bf16 cache is read at 99 % of the bandwidth of a copy, and an fp8 cache takes 54 % of
# the time. Heads of more than 128 dimensions were not measured.
_THROUGHPUT = DecodeOptions(32, 1, 3), DecodeOptions(16, 1, 3), DecodeOptions(16, 1, 3)
# Options for low latency. A tile is the smallest split.
_LATENCY = DecodeOptions(64, 4, 3), DecodeOptions(64, 4, 2), DecodeOptions(32, 4, 3)
# Float32 products use no tensor cores, so all their inputs must fit the registers.
_FLOAT32 = DecodeOptions(16, 4, 2)


def decode_options(programs: int, head_dim: int, dtype: torch.dtype) -> DecodeOptions:
    """Return the options for ``programs``, rows times kv heads, and queries of ``dtype``."""
    if dtype == torch.float32:
        return _FLOAT32
    return (_LATENCY if programs <= _FEW_PROGRAMS else _THROUGHPUT)[(head_dim > 64) + (head_dim > 128)]


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Return the number of programs per row and kv head for contexts of at most ``longest`` tokens."""
    programs, wanted = rows * kv_heads, 1
    if longest > LONG_CONTEXT and programs <= _FEW_PROGRAMS:
        wanted = _LONG_PROGRAMS // programs
    elif longest > _MAX_UNSPLIT and programs < _BUSY_PROGRAMS:
        wanted = _FEW_PROGRAMS // programs
    return min(wanted, longest // _SMALLEST_SPLIT, MAX_SPLITS) if wanted > 1 else 1


@triton.jit
def as_dtype(values, dtype: tl.constexpr):
    """Convert ``values`` of the cache to ``dtype`` for a product."""
    if dtype == tl.bfloat16 and values.dtype != dtype:
        # A direct conversion to bf16 is slow, because it uses the unit that also computes exponentials.
        values = values.to(tl.float32)
    return values.to(dtype)


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """Return ``SOFT_CAP * tanh(x)`` for ``scores``, which are ``2 * log2(e) * x``."""
    # tanh(x) = 1 - 2 / (e**(2 * x) + 1), which is right for an infinite power too.
    return SOFT_CAP - (2 * SOFT_CAP) / (tl.exp2(scores) + 1.0)


@triton.jit
def add_sinks(sums, peak, total, sinks):
    """Return the state of the softmax with ``sinks``, a score to base 2 per row of ``sums``, or -inf for none."""
    higher = tl.maximum(peak, sinks)
    correction = tl.exp2(peak - higher)
    return sums * correction[:, None], higher, total * correction + tl.exp2(sinks - higher)


@triton.jit
def _unpack_fp8(pairs, ASSEMBLY: tl.constexpr):
    """Return the lower and the upper bytes of ``pairs``, two fp8 numbers in an int16, as float16."""
    if ASSEMBLY:
        # This converts two pairs at once. The other branch compiles to three times the instructions.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    lower = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    upper = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return lower, upper


@triton.jit
def _page_ids(table, start, end, PAGE: tl.constexpr, PAGES: tl.constexpr):
    """Return the ids of ``PAGES`` pages from token ``start`` on, and 0 for pages from token ``end`` on."""
    pages = tl.arange(0, PAGES)
    return tl.load(table + start // PAGE + pages, start + pages * PAGE < end, other=0)


@triton.jit(do_not_specialize=["splits", "table_stride", "window"])
def _decode(
    queries,
    keys,
    values,
    token_slots,
    positions,
    page_table,
    prefix_tokens,
    prefix_output,
    prefix_lse,
    sinks,
    output,
    lse,
    table_stride,
    splits,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Attend for each row and kv head. Grid: ``(rows * kv_heads, splits)``.

    With ``WINDOWED``, which excludes ``PREFIX``, a row attends to its last ``window`` tokens. ``scale`` and
    ``SOFT_CAP`` are ``ScoreFactors``. With ``SINKS``, ``sinks [heads]`` take part in the softmax of each row once. With
    ``PAIRS``, keys and values are fp8, and ``values`` are pairs in int16, ``[page_count, kv_heads, page_size, head_dim
    // 2]``.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM  # of values, in elements
    # A tile consists of whole pages, or is a part of one page.
    PAGES: tl.constexpr = TILE // PAGE if TILE > PAGE else 1
    SPAN: tl.constexpr = TILE // PAGES
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    members = tl.arange(0, COLUMNS)
    dims = tl.arange(0, HEAD_DIM)
    head_rows = row * HEADS + head * GROUP + members
    offsets = head_rows[:, None] * HEAD_DIM + dims[None, :]
    # All loads that depend on the row only are issued before the first wait, so padding rows do not return early.
    slot = tl.load(token_slots + row)
    end = tl.load(positions + row) + 1
    begin = 0
    if WINDOWED:
        # Tiles are aligned to pages or parts of pages, so the first may contain tokens before the window.
        first = tl.maximum(end - window, 0)
        begin = first // SPAN * SPAN
    if PREFIX:
        begin = tl.load(prefix_tokens + row)
    query = tl.load(queries + offsets, (members < GROUP)[:, None], other=0.0)
    inside = (members < GROUP) & (slot >= 0)
    end = tl.where(slot >= 0, end, begin)
    if SINKS:
        # The first split and no prefix has the sink, so that it counts once.
        sink = (
            tl.load(sinks + head * GROUP + members, inside & (split == 0), other=float("-inf")).to(tl.float32) * LOG2_E
        )
    if PREFIX:
        has_prefix = inside & (begin > 0) & (split == 0)
    if SPLIT:
        # Shares depend on the row's length, which only the device has. The last splits of a short row are empty.
        share = tl.cdiv(tl.cdiv(end - begin, TILE), splits) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)
    table = page_table + slot.to(tl.int64) * table_stride
    next_pages = _page_ids(table, begin, end, PAGE, PAGES)
    if PREFIX:
        prefix_peak = tl.load(prefix_lse + head_rows, has_prefix, other=float("-inf"))
        prefix_result = tl.load(prefix_output + offsets, has_prefix[:, None], other=0.0)

    if PAIRS:
        # Queries are a few hundred at most. Values beyond the range of float16 are clamped.
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    query = tl.trans(query)
    tokens = tl.arange(0, TILE)
    page_offset = head * (PAGE * HEAD_DIM) + (tokens % SPAN) * HEAD_DIM
    keys += page_offset[:, None] + dims[None, :]
    values += (page_offset // (HEAD_DIM // WIDTH))[None, :] + tl.arange(0, WIDTH)[:, None]
    factor = scale if SOFT_CAP is None else 1.0
    # A finite start avoids inf - inf, which is NaN.
    peak = tl.full((COLUMNS,), -1e30, tl.float32)
    totals = tl.zeros((TILE, COLUMNS), tl.float32)
    sums = tl.zeros((WIDTH, COLUMNS), tl.float32)
    if PAIRS:
        upper_sums = sums
    for start in range(begin, end, TILE):
        visible = tokens < end - start
        if WINDOWED:
            visible = visible & (tokens >= first - start)
        # Page ids are read once per page, one tile ahead. An address takes one multiplication and one addition, because
        # ``keys`` and ``values`` already include all terms but the page.
        page = tl.reshape(tl.broadcast_to(next_pages.to(tl.int64)[:, None], (PAGES, SPAN)), (TILE,))
        next_pages = _page_ids(table, start + TILE, end, PAGE, PAGES)
        key_offset, value_offset = page * PAGE_STRIDE, page * (PAGE_STRIDE // HEAD_DIM * WIDTH)
        if SPAN < PAGE:
            key_offset += start % PAGE * HEAD_DIM
            value_offset += start % PAGE * WIDTH
        key_offset, value_offset = tl.multiple_of(key_offset, HEAD_DIM), tl.multiple_of(value_offset, WIDTH)
        key = tl.load(keys + key_offset[:, None], visible[:, None], other=0.0)
        value = tl.load(values + value_offset[None, :], visible[None, :], other=0.0)
        scores = tl.dot(as_dtype(key, query.dtype), query, input_precision="ieee")
        if SOFT_CAP is not None:
            scores = soft_capped(scores * scale, SOFT_CAP)
        scores = tl.where(visible[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=0) * factor)
        weights = tl.exp2(scores * factor - higher[None, :])
        correction = tl.exp2(peak - higher)[None, :]
        totals = totals * correction + weights
        weights = weights.to(query.dtype)
        if PAIRS:
            value, upper = _unpack_fp8(value, ASSEMBLY)
            upper_sums = tl.dot(upper, weights, upper_sums * correction)
        sums = tl.dot(as_dtype(value, query.dtype), weights, sums * correction, input_precision="ieee")
        peak = higher

    total = tl.sum(totals, axis=0)
    result = tl.reshape(tl.trans(tl.join(sums, upper_sums), 1, 0, 2), (COLUMNS, HEAD_DIM)) if PAIRS else tl.trans(sums)
    if PREFIX:
        higher = tl.maximum(peak, prefix_peak)
        own, shared = tl.exp2(peak - higher), tl.exp2(prefix_peak - higher)
        total = total * own + shared
        result = result * own[:, None] + prefix_result.to(tl.float32) * shared[:, None]
        peak = higher
    if SINKS:
        result, peak, total = add_sinks(result, peak, total, sink)
    if SPLIT:
        nonempty = total > 0.0
        total = tl.where(nonempty, total, 1.0)
        head_rows = head_rows * splits + split
        offsets = head_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(lse + head_rows, tl.where(nonempty, peak + tl.log2(total), float("-inf")), inside)
    result = result * (1.0 / total)[:, None]
    tl.store(output + offsets, result.to(output.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial,
    lse,
    token_slots,
    output,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MOST: tl.constexpr,
):
    """Merge the partial results of each row and head. Grid: ``(rows * heads,)``."""
    head_row = tl.program_id(0).to(tl.int64)
    if tl.load(token_slots + head_row // HEADS) < 0:
        return
    parts = tl.arange(0, MOST)
    dims = tl.arange(0, HEAD_DIM)
    inside = parts < splits
    logs = tl.load(lse + head_row * splits + parts, inside, other=float("-inf"))
    results = tl.load(
        partial + (head_row * splits + parts)[:, None] * HEAD_DIM + dims[None, :], inside[:, None], other=0.0
    )
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    result = tl.sum(weights[:, None] * results, axis=0) / tl.sum(weights, axis=0)
    tl.store(output + head_row * HEAD_DIM + dims, result.to(output.dtype.element_ty))


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    output: torch.Tensor,
    rules: LayerAttention,
    *,
    rows: int | None = None,
    prefix: PrefixState | None = None,
    splits: int = 1,
    options: DecodeOptions | None = None,
) -> None:
    """Write the attention of the first ``rows`` queries to ``output``; None means all queries.

    A query attends to tokens 0 to ``positions`` of its slot, by ``rules``. ``queries`` and ``output [.., heads,
    head_dim]``, and ``keys`` and ``values [page_count, kv_heads, page_size, head_dim]`` are contiguous and of one
    dtype, or keys and values are fp8. ``token_slots`` and ``positions [..]`` and ``page_table [max_slots, max_pages]``
    are int32. Slot -1 is padding, whose output is not changed.

    Tokens of a row's ``prefix`` are not read again; ``prefix`` must be None with a window. ``splits`` is the number
    of programs per row and kv head, 1 to ``MAX_SPLITS``. From 2 on, a second kernel merges their results.
    """
    rows = queries.shape[0] if rows is None else rows
    _, heads, head_dim = queries.shape
    _, kv_heads, page_size, _ = keys.shape
    options = options or decode_options(rows * kv_heads, head_dim, queries.dtype)
    target, lse = output, output
    if splits > 1:
        target = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=queries.device)
        lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=queries.device)
    state = prefix or PrefixState(token_slots, queries, queries)  # placeholders, not read
    sinks, factors = rules.sinks, score_factors(rules)
    pairs = keys.dtype == FP8 and queries.dtype != torch.float32
    _decode[(rows * kv_heads, splits)](
        queries, keys, values.view(torch.int16) if pairs else values, token_slots, positions, page_table, *state,
        queries if sinks is None else sinks, target, lse, page_table.stride(0), splits, rules.window or 0,
        factors.scale, HEADS=heads, KV_HEADS=kv_heads,
        COLUMNS=max(_SMALLEST_COLUMNS, triton.next_power_of_2(heads // kv_heads)), HEAD_DIM=head_dim, PAGE=page_size,
        TILE=options.tile, PREFIX=prefix is not None, WINDOWED=rules.window is not None, SOFT_CAP=factors.soft_cap,
        SINKS=sinks is not None, SPLIT=splits > 1, PAIRS=pairs, ASSEMBLY=_ASSEMBLY, num_warps=options.warps,
        num_stages=options.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows * heads,)](
            target, lse, token_slots, output, splits, HEADS=heads, HEAD_DIM=head_dim, MOST=MAX_SPLITS, num_warps=2
        )
