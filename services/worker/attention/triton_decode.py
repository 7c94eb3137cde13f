"""Attention of rows of one token each over their pages: bound by memory, so written for bytes in flight.

A program takes the query heads of one kv head of one row together, so that keys and values are read once. Softmax is
in base 2, and so are all log-sum-exps here.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
# The smallest side of a matrix product.
_SMALLEST_DOT = 16
# Enough programs to keep every multiprocessor of the chips we know busy; with fewer, contexts are split.
_PROGRAMS = 3 * 132
# Up to so many tokens a second kernel costs more than going through them one after the other.
_UNSPLIT = 512
_SMALLEST_SPLIT = 128  # tokens
MAX_SPLITS = 32


class DecodeOptions(NamedTuple):
    """How the kernel is built."""

    tile: int  # tokens read at once, a power of two, at least 16
    warps: int
    stages: int  # 1: tiles go through registers, one in flight; more: through shared memory


class PrefixState(NamedTuple):
    """Attention over the shared prefixes, of which the rows' own tokens take it from there."""

    tokens: torch.Tensor  # [rows] int32, multiples of page_size; 0 = none, the other two are not read then
    output: torch.Tensor  # [rows, heads, head_dim]
    lse: torch.Tensor  # [rows, heads] float32, base 2


def decode_options(programs: int, head_dim: int, dtype: torch.dtype) -> DecodeOptions:
    """For so many programs, which is rows times kv heads: throughput from some hundreds on, latency below. ``dtype``:
    of the queries."""
    if dtype == torch.float32:
        return DecodeOptions(32, 4, 1)
    if programs < _PROGRAMS:
        return DecodeOptions(128 if head_dim <= 64 else 64, 4, 2)
    # One warp, two tiles in flight: on an H200 99 % of what a copy gets, from 110 tokens a row on.
    return DecodeOptions(32, 1 if head_dim <= 64 else 2, 2)


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Programs that share one row's context of at most ``longest`` tokens."""
    if longest <= _UNSPLIT:
        return 1
    return max(1, min(_PROGRAMS // (rows * kv_heads), longest // _SMALLEST_SPLIT, MAX_SPLITS))


@triton.jit
def _read(
    keys, values, table, head_place, start, end,
    PAGE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys ``[HEAD_DIM, TILE]`` and values ``[TILE, HEAD_DIM]`` of tokens ``start`` on; zeros from ``end`` on."""
    tokens = start + tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    seen = tokens < end
    pages = tl.load(table + tokens // PAGE, seen, other=0).to(tl.int64)
    rows = pages * PAGE_STRIDE + (head_place + (tokens % PAGE) * HEAD_DIM)
    # Keys are read transposed: else they are brought into that order before the values are asked for.
    key = tl.load(keys + rows[None, :] + dims[:, None], seen[None, :], other=0.0)
    value = tl.load(values + rows[:, None] + dims[None, :], seen[:, None], other=0.0)
    return key, value


@triton.jit
def as_dtype(found, dtype: tl.constexpr):
    """``found`` of a cache of fp8 as numbers to multiply with; of ``dtype`` already: as it is."""
    if found.dtype != dtype:
        # Straight to bf16 goes one by one through the unit that also takes exponentials.
        found = found.to(tl.float32).to(dtype)
    return found


@triton.jit(do_not_specialize=["splits", "table_stride"])
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
    output,
    lse,
    table_stride,
    splits,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid ``(rows * kv_heads, splits)``: the heads of a row next to each other, as they are in memory."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    slot = tl.load(token_slots + row)
    if slot < 0:
        return
    end = tl.load(positions + row) + 1
    begin = 0
    if PREFIX:
        prefix = tl.load(prefix_tokens + row)
        begin = prefix
    if SPLIT:
        # By the row's own length, which only the device knows; the last splits of a short row have nothing to do.
        share = tl.cdiv(tl.cdiv(end - begin, TILE), splits) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)

    table = page_table + slot.to(tl.int64) * table_stride
    head_place = head * (PAGE * HEAD_DIM)
    if AHEAD:
        # On their way before anything waits for the query and the prefix.
        key, value = _read(keys, values, table, head_place, begin, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)

    members = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_DIM)
    inside = members < GROUP
    places = row * HEADS + head * GROUP + members
    query = tl.load(queries + places[:, None] * HEAD_DIM + dims[None, :], inside[:, None], other=0.0)
    if PREFIX:
        given = inside & (prefix > 0) & (split == 0)
        peak = tl.load(prefix_lse + places, given, other=float("-inf"))
        total = tl.where(given, 1.0, 0.0)
        sums = tl.load(prefix_output + places[:, None] * HEAD_DIM + dims[None, :], given[:, None], other=0.0)
        sums = sums.to(tl.float32)
    else:
        peak = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PADDED,), tl.float32)
        sums = tl.zeros((GROUP_PADDED, HEAD_DIM), tl.float32)

    for start in range(begin, end, TILE):
        if not AHEAD:
            key, value = _read(keys, values, table, head_place, start, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)
        scores = tl.dot(query, as_dtype(key, query.dtype), input_precision="ieee") * scale
        scores = tl.where((start + tl.arange(0, TILE) < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        value = as_dtype(value, query.dtype)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
        peak = higher
        if AHEAD:
            key, value = _read(keys, values, table, head_place, start + TILE, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)

    if SPLIT:
        some = total > 0.0
        total = tl.where(some, total, 1.0)
        places = places * splits + split
        tl.store(lse + places, tl.where(some, peak + tl.log2(total), float("-inf")), inside)
    result = sums / total[:, None]
    tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), inside[:, None])


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
    """Grid ``(rows * heads,)``."""
    place = tl.program_id(0).to(tl.int64)
    if tl.load(token_slots + place // HEADS) < 0:
        return
    parts = tl.arange(0, MOST)
    dims = tl.arange(0, HEAD_DIM)
    inside = parts < splits
    logs = tl.load(lse + place * splits + parts, inside, other=float("-inf"))
    found = tl.load(partial + (place * splits + parts)[:, None] * HEAD_DIM + dims[None, :], inside[:, None], other=0.0)
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    result = tl.sum(weights[:, None] * found, axis=0) / tl.sum(weights, axis=0)
    tl.store(output + place * HEAD_DIM + dims, result.to(output.dtype.element_ty))


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    output: torch.Tensor,
    *,
    rows: int | None = None,
    prefix: PrefixState | None = None,
    splits: int = 1,
    options: DecodeOptions | None = None,
) -> None:
    """Attend each of the first ``rows`` (None = all) queries to its slot's tokens 0 to ``positions``, into ``output``.

    ``queries`` and ``output [.., heads, head_dim]``, ``keys`` and ``values [page_count, kv_heads, page_size,
    head_dim]``, all contiguous and of one dtype, or keys and values of fp8; ``token_slots`` (-1 = padding: its output
    stays as it is) and ``positions [..]``, ``page_table [max_slots, max_pages]`` int32.
    Tokens of a row's ``prefix`` are not read again.
    ``splits``: 1 to ``MAX_SPLITS`` programs share a row, and from 2 on another kernel merges what they found.
    """
    rows = queries.shape[0] if rows is None else rows
    _, heads, head_dim = queries.shape
    _, kv_heads, page_size, _ = keys.shape
    options = options or decode_options(rows * kv_heads, head_dim, queries.dtype)
    target, lse = output, output
    if splits > 1:
        target = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=queries.device)
        lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=queries.device)
    state = prefix or PrefixState(token_slots, queries, queries)  # not read
    _decode[(rows * kv_heads, splits)](
        queries, keys, values, token_slots, positions, page_table, *state, target, lse, page_table.stride(0), splits,
        _LOG2_E / head_dim**0.5, HEADS=heads, KV_HEADS=kv_heads,
        GROUP_PADDED=max(_SMALLEST_DOT, triton.next_power_of_2(heads // kv_heads)), HEAD_DIM=head_dim, PAGE=page_size,
        TILE=options.tile, PREFIX=prefix is not None, SPLIT=splits > 1, AHEAD=options.stages == 1,
        num_warps=options.warps,
        num_stages=options.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows * heads,)](
            target, lse, token_slots, output, splits, HEADS=heads, HEAD_DIM=head_dim, MOST=MAX_SPLITS, num_warps=2
        )
