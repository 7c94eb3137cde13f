"""Kernel for attention of a few decode rows, from the projection to the output.

With few rows, the latency of a sequence of kernels dominates. One kernel therefore does the work of ``triton_store``
and ``triton_decode``. The last program of a row and kv head to finish merges the results of all programs. Cached keys
and values are requested before the projection is ready. Softmax uses base 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.worker.attention.base import HeadNorms, LayerAttention
from services.worker.attention.triton_decode import LOG2_E, add_sinks, as_dtype, score_factors, soft_capped
from services.worker.attention.triton_store import round_to_cache
from services.worker.layers.fp8 import FP8, LARGEST
from services.worker.layers.triton_overlap import overlapping, overlaps

MOST_ROWS = 16
_SMALLEST_DOT = 16  # the smallest side of a matrix product
_MOST_SPLITS = 32
_FEWEST_TOKENS = 128  # of the longest context per program
_FEW_PAIRS = 32  # of a row and a kv head
_MERGED = 8192  # values merged per iteration


class FewOptions(NamedTuple):
    """Tile size and launch options of the kernel."""

    tile: int  # tokens per iteration, a power of two, at least 16
    warps: int
    programs: int  # per multiprocessor


def choose_options(pairs: int, head_dim: int, cached: torch.dtype) -> FewOptions:
    """Return the options for ``pairs`` of a row and a kv head, and a cache of dtype ``cached``.

    They were measured on an H200 with heads of 64 and 128 and contexts of 150 to 5,000 tokens. ``programs`` is mostly
    the number that fits on a multiprocessor at once, which the registers of a program limit.
    """
    tile = _tile(8192, head_dim)
    if head_dim > 128:
        return FewOptions(tile, 4, 3)
    if cached == FP8:
        return FewOptions(tile, 4, 2) if pairs <= _FEW_PAIRS else FewOptions(_tile(2048, head_dim), 1, 8)
    return FewOptions(tile, 2, 4) if head_dim == 128 else FewOptions(tile, 4, 6)


def choose_splits(pairs: int, longest: int, programs: int) -> int:
    """Return the number of programs per row and kv head for contexts of at most ``longest`` tokens.

    ``programs`` is the largest number for all ``pairs``.
    """
    shares: int = triton.cdiv(longest - 1, _FEWEST_TOKENS)
    return max(1, min(programs // pairs, shares, _MOST_SPLITS))


def _tile(elements: int, head_dim: int) -> int:
    """Return the tokens of a tile of at most ``elements`` elements of keys, from 16 to 128."""
    return max(16, min(128, elements // head_dim))


def new_arrival_counters(kv_heads: int, device: torch.device) -> torch.Tensor:
    """Return counters of finished programs per row and kv head, ``[MOST_ROWS * kv_heads]`` int32.

    They are zero again after each layer, so all steps of a stream can share them.
    """
    return torch.zeros(MOST_ROWS * kv_heads, dtype=torch.int32, device=device)


@triton.jit
def _read(
    keys, values, table, head_offset, start, end,
    PAGE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return keys ``[HEAD_DIM, TILE]`` and values ``[TILE, HEAD_DIM]`` from ``start`` on, zeros from ``end`` on."""
    tokens = start + tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    visible = tokens < end
    pages = tl.load(table + tokens // PAGE, visible, other=0).to(tl.int64)
    rows = pages * PAGE_STRIDE + (head_offset + (tokens % PAGE) * HEAD_DIM)
    key = tl.load(keys + rows[None, :] + dims[:, None], visible[None, :], other=0.0)
    value = tl.load(values + rows[:, None] + dims[None, :], visible[:, None], other=0.0)
    return key, value


@triton.jit
def _rotated(
    pointers, inside, weight, eps, cosines, sines,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Return the heads at ``pointers [heads, 1]``, normalised and rotated, ``[heads, HEAD_DIM]`` float32."""
    dims = tl.arange(0, HEAD_DIM)
    swapped_dims = (dims + HEAD_DIM // 2) % HEAD_DIM
    values = tl.load(pointers + dims[None, :], inside, other=0.0).to(tl.float32)
    swapped = tl.load(pointers + swapped_dims[None, :], inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
        values = values * inverse * tl.load(weight + dims).to(tl.float32)[None, :]
        swapped = swapped * inverse * tl.load(weight + swapped_dims).to(tl.float32)[None, :]
    if ROTATED:
        # The table contains negated sines for the first half.
        values = values * cosines[None, :] + swapped * sines[None, :]
    return values


@triton.jit
def _merge(partial, lse, output, first, sharing, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
           HEAD_DIM: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """Merge the partial results of ``sharing`` programs, from index ``first`` on, for ``GROUP`` heads at ``output``."""
    members, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_DIM)
    inside = members < GROUP
    peak = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    sums = tl.zeros((GROUP_PADDED, HEAD_DIM), tl.float32)
    for start in range(0, sharing, AT_ONCE):
        parts = start + tl.arange(0, AT_ONCE)
        real = (parts < sharing)[:, None]
        loaded = real & inside[None, :]
        indices = (first + parts)[:, None] * GROUP + members[None, :]
        # Bypass the L1 cache, which is not coherent with writes of other multiprocessors.
        logs = tl.load(lse + indices, loaded, other=0.0, cache_modifier=".cg")
        pointers = partial + indices[:, :, None] * HEAD_DIM + dims[None, None, :]
        results = tl.load(pointers, loaded[:, :, None], other=0.0, cache_modifier=".cg")
        logs = tl.where(real, logs, float("-inf"))
        higher = tl.maximum(peak, tl.max(logs, axis=0))
        weights = tl.exp2(logs - higher[None, :])
        correction = tl.exp2(peak - higher)
        total = total * correction + tl.sum(weights, axis=0)
        sums = sums * correction[:, None] + tl.sum(weights[:, :, None] * results, axis=0)
        peak = higher
    target = output + members[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, (sums / total[:, None]).to(output.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["splits", "table_stride", "window"])
def _decode_few(
    qkv,
    token_slots,
    positions,
    page_table,
    cos,
    sin,
    q_norm,
    k_norm,
    sinks,
    keys,
    values,
    output,
    partial,
    lse,
    arrivals,
    table_stride,
    splits,
    window,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GROUP_MERGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    ROTATED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise, rotate, store and attend for each row and kv head. Grid: ``(rows * kv_heads, splits)``.

    The first program of a row and kv head also stores the row's new token. With ``WINDOWED``, a row attends to its last
    ``window`` tokens, including the new one. ``scale`` and ``SOFT_CAP`` are ``ScoreFactors``. With ``SINKS``, ``sinks
    [heads]`` take part in the softmax of each row once.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    if OVERLAP:
        gdc_launch_dependents()
    row_head = tl.program_id(0)
    row, head, split = (row_head // KV_HEADS).to(tl.int64), row_head % KV_HEADS, tl.program_id(1)
    slot, position = tl.load(token_slots + row), tl.load(positions + row)
    members, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_DIM)
    inside = (members < GROUP)[:, None]
    target = output + (row * HEADS + head * GROUP) * HEAD_DIM
    # Shares depend on the row's length, which only the device has. Splits of a short row may be empty.
    oldest = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    cached = position - oldest
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, TILE), splits), 1) * TILE if SPLIT else tl.maximum(cached, 1)
    sharing = tl.maximum(tl.cdiv(cached, share), 1)
    if (slot < 0) | (split >= sharing):
        if OVERLAP:
            gdc_wait()
        if split == 0:
            zeros = tl.zeros((GROUP_PADDED, HEAD_DIM), output.dtype.element_ty)
            tl.store(target + members[:, None] * HEAD_DIM + dims[None, :], zeros, inside)
        return

    begin = oldest + split * share
    end = tl.minimum(position, begin + share)
    table = page_table + slot.to(tl.int64) * table_stride
    head_offset = head * (PAGE * HEAD_DIM)
    new_page = tl.load(table + position // PAGE).to(tl.int64)
    key, value = _read(keys, values, table, head_offset, begin, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)
    angles = position.to(tl.int64) * HEAD_DIM + dims
    cosines, sines = angles, angles  # not read without ``ROTATED``
    if ROTATED:
        cosines, sines = tl.load(cos + angles), tl.load(sin + angles)
    if OVERLAP:
        gdc_wait()

    source = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    pointers = source + (head * GROUP + members)[:, None] * HEAD_DIM
    query = _rotated(pointers, inside, q_norm, eps, cosines, sines, HEAD_DIM, NORM, ROTATED).to(qkv.dtype.element_ty)
    one = tl.arange(0, 1)[:, None]
    pointers = source + (HEADS + head + one) * HEAD_DIM
    new_key = _rotated(pointers, one == 0, k_norm, eps, cosines, sines, HEAD_DIM, NORM, ROTATED)
    new_value = tl.load(source + (HEADS + KV_HEADS + head + one) * HEAD_DIM + dims[None, :])
    new_key = round_to_cache(new_key, keys.dtype.element_ty, LARGEST)
    new_value = round_to_cache(new_value, values.dtype.element_ty, LARGEST)
    first = split == 0
    stored = new_page * PAGE_STRIDE + head_offset + (position % PAGE) * HEAD_DIM + one * HEAD_DIM + dims[None, :]
    tl.store(keys + stored, new_key, first & (one == 0))
    tl.store(values + stored, new_value, first & (one == 0))

    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    if SOFT_CAP is not None:
        score = soft_capped(score, SOFT_CAP)
    peak = tl.where(first, score, float("-inf"))
    total = tl.where(first, 1.0, 0.0) + tl.zeros((GROUP_PADDED,), tl.float32)
    sums = tl.where(first, new_value.to(tl.float32), 0.0) + tl.zeros((GROUP_PADDED, HEAD_DIM), tl.float32)
    for start in range(begin, end, TILE):
        scores = tl.dot(query, as_dtype(key, query.dtype), input_precision="ieee") * scale
        if SOFT_CAP is not None:
            scores = soft_capped(scores, SOFT_CAP)
        scores = tl.where((start + tl.arange(0, TILE) < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        correction = tl.exp2(peak - higher)
        total = total * correction + tl.sum(weights, axis=1)
        value = as_dtype(value, query.dtype)
        sums = tl.dot(weights.to(value.dtype), value, sums * correction[:, None], input_precision="ieee")
        peak = higher
        key, value = _read(keys, values, table, head_offset, start + TILE, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)

    if SINKS:
        sink = (
            tl.load(sinks + head * GROUP + members, first & (members < GROUP), other=float("-inf")).to(tl.float32)
            * LOG2_E
        )
        sums, peak, total = add_sinks(sums, peak, total, sink)
    result = sums / total[:, None]
    if sharing == 1:
        tl.store(target + members[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), inside)
    elif SPLIT:
        indices = (row_head * splits + split) * GROUP + members
        tl.store(partial + indices[:, None] * HEAD_DIM + dims[None, :], result, inside)
        tl.store(lse + indices, peak + tl.log2(total), members < GROUP)
        tl.debug_barrier()  # all threads must have written before the counter is incremented
        if tl.atomic_add(arrivals + row_head, 1, sem="acq_rel") == sharing - 1:
            _merge(partial, lse, target, row_head * splits, sharing, GROUP, GROUP_MERGED, HEAD_DIM, AT_ONCE)
            tl.store(arrivals + row_head, 0)


def few_attention(
    qkv: torch.Tensor,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    norms: HeadNorms | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    arrivals: torch.Tensor,
    rules: LayerAttention,
    *,
    splits: int,
    options: FewOptions | None = None,
) -> None:
    """Normalise, rotate, store and attend for decode rows, like ``rotate_and_store`` and then ``decode_attention``.

    Arguments are as in these functions. ``qkv`` is bfloat16 or float16. Earlier steps must have cached the other tokens
    of each row. ``arrivals`` is from ``new_arrival_counters``. Output rows of padding are set to zero.
    """
    rows, heads, head_dim = output.shape
    _, kv_heads, page_size, _ = keys.shape
    group = heads // kv_heads
    merged = triton.next_power_of_2(group)
    tile, warps, _ = options or choose_options(rows * kv_heads, head_dim, keys.dtype)
    partial = lse = arrivals  # placeholders, not read
    if splits > 1:
        partial = torch.empty((rows * kv_heads * splits * group, head_dim), dtype=torch.float32, device=qkv.device)
        lse = torch.empty(rows * kv_heads * splits * group, dtype=torch.float32, device=qkv.device)
    overlap, sinks, factors = overlaps(qkv.device), rules.sinks, score_factors(rules)
    q_norm, k_norm, eps = norms or HeadNorms(qkv, qkv, 0.0)  # placeholders, not read
    _decode_few[(rows * kv_heads, splits)](
        qkv, token_slots, positions, page_table, *(tables or (qkv, qkv)), q_norm, k_norm,
        qkv if sinks is None else sinks, keys, values, output, partial, lse, arrivals, page_table.stride(0), splits,
        rules.window or 0, eps, factors.scale, HEADS=heads, KV_HEADS=kv_heads,
        GROUP_PADDED=max(_SMALLEST_DOT, merged), GROUP_MERGED=merged, HEAD_DIM=head_dim, PAGE=page_size, TILE=tile,
        NORM=norms is not None, ROTATED=tables is not None, WINDOWED=rules.window is not None,
        SOFT_CAP=factors.soft_cap, SINKS=sinks is not None, SPLIT=splits > 1,
        AT_ONCE=max(1, min(_MOST_SPLITS, _MERGED // (merged * head_dim))), LARGEST=LARGEST, OVERLAP=overlap,
        num_warps=warps, num_stages=1, **overlapping(overlap),
    )  # fmt: skip
