"""Kernel that normalises and rotates a step's projection, and stores keys and values, in one pass."""

import torch
import triton
import triton.language as tl

from services.worker.attention.base import HeadNorms
from services.worker.layers.fp8 import LARGEST

_WARPS = 2


@triton.jit
def _rotated(
    source, weight, eps, angles, cos, sin, heads, inside,
    HALF: tl.constexpr, NORM: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Return both halves of ``heads`` at ``source``, normalised and rotated, ``[heads, HALF]`` float32 each."""
    dims = tl.arange(0, HALF)
    pointers = source + heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(pointers, inside[:, None], other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * inverse * tl.load(weight + dims).to(tl.float32)[None, :]
        second = second * inverse * tl.load(weight + HALF + dims).to(tl.float32)[None, :]
    rotated = first, second
    if ROTATED:
        # The table contains negated sines for the first half.
        cos_first, cos_second = tl.load(cos + angles + dims)[None, :], tl.load(cos + angles + HALF + dims)[None, :]
        sin_first, sin_second = tl.load(sin + angles + dims)[None, :], tl.load(sin + angles + HALF + dims)[None, :]
        rotated = first * cos_first + second * sin_first, second * cos_second + first * sin_second
    return rotated


@triton.jit
def round_to_cache(values, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Convert ``values`` to the cache's ``dtype``. Fp8 has no infinity, so values are clamped; NaN remains."""
    if dtype == values.dtype:
        return values
    if dtype == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)


# Specialising the stride would compile the kernel again for another table.
@triton.jit(do_not_specialize=["table_stride"])
def _rotate_and_store(
    qkv,
    token_slots,
    positions,
    page_table,
    cos,
    sin,
    q_norm,
    k_norm,
    queries,
    keys,
    values,
    output,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    ROTATED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Normalise, rotate and store one token per program. Grid: ``(tokens,)``."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots + token)
    heads = tl.arange(0, HEADS_PADDED)
    query_inside = heads < HEADS
    dims = tl.arange(0, HALF)
    dtype = queries.dtype.element_ty
    cached = keys.dtype.element_ty
    query_offsets = token * HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + dims[None, :]
    if slot < 0:
        zeros = tl.zeros((HEADS_PADDED, HALF), dtype)
        for half in tl.static_range(2):
            tl.store(queries + query_offsets + half * HALF, zeros, query_inside[:, None])
            tl.store(output + query_offsets + half * HALF, zeros, query_inside[:, None])
        return
    position = tl.load(positions + token)
    angles = position.to(tl.int64) * HEAD_DIM
    page = tl.load(page_table + slot.to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
    source = qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM

    first, second = _rotated(source, q_norm, eps, angles, cos, sin, heads, query_inside, HALF, NORM, ROTATED)
    tl.store(queries + query_offsets, first.to(dtype), query_inside[:, None])
    tl.store(queries + query_offsets + HALF, second.to(dtype), query_inside[:, None])

    kv_heads = tl.arange(0, KV_HEADS_PADDED)
    inside = kv_heads < KV_HEADS
    source += HEADS * HEAD_DIM
    first, second = _rotated(source, k_norm, eps, angles, cos, sin, kv_heads, inside, HALF, NORM, ROTATED)
    stored = page * (KV_HEADS * PAGE * HEAD_DIM) + (position % PAGE) * HEAD_DIM
    offsets = stored + kv_heads[:, None] * (PAGE * HEAD_DIM) + dims[None, :]
    tl.store(keys + offsets, round_to_cache(first, cached, LARGEST), inside[:, None])
    tl.store(keys + offsets + HALF, round_to_cache(second, cached, LARGEST), inside[:, None])

    source += KV_HEADS * HEAD_DIM
    all_dims = tl.arange(0, HEAD_DIM)
    value = tl.load(source + kv_heads[:, None] * HEAD_DIM + all_dims[None, :], inside[:, None])
    offsets = stored + kv_heads[:, None] * (PAGE * HEAD_DIM) + all_dims[None, :]
    tl.store(values + offsets, round_to_cache(value, cached, LARGEST), inside[:, None])


def rotate_and_store(
    qkv: torch.Tensor,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    norms: HeadNorms | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    *,
    warps: int = _WARPS,
) -> None:
    """Normalise and rotate ``qkv``, write queries to ``queries``, and store keys and values in their pages.

    ``qkv [tokens, (heads + 2 * kv_heads) * head_dim]`` is contiguous. ``token_slots`` and ``positions [tokens]`` and
    ``page_table [max_slots, max_pages]`` are int32. Slot -1 is padding: zeros are written to ``queries [tokens, heads,
    head_dim]`` and ``output [tokens, heads * head_dim]``, and nothing is stored. ``tables`` are the cosines and sines
    of ``Rotary``; None = nothing is rotated. ``keys`` and ``values [page_count, kv_heads, page_size, head_dim]`` have
    the dtype of ``qkv``, or fp8 without a scale.
    """
    tokens, heads, head_dim = queries.shape
    _, kv_heads, page_size, _ = keys.shape
    q_norm, k_norm, eps = norms or HeadNorms(qkv, qkv, 0.0)  # placeholders, not read
    _rotate_and_store[(tokens,)](
        qkv, token_slots, positions, page_table, *(tables or (qkv, qkv)), q_norm, k_norm, queries, keys, values, output,
        page_table.stride(0), eps, HEADS=heads, KV_HEADS=kv_heads, HEADS_PADDED=triton.next_power_of_2(heads),
        KV_HEADS_PADDED=triton.next_power_of_2(kv_heads), HEAD_DIM=head_dim, PAGE=page_size, NORM=norms is not None,
        ROTATED=tables is not None, LARGEST=LARGEST, num_warps=warps,
    )  # fmt: skip
