"""Attention of a few rows of one token, from the projection to the output in one kernel.

What such rows wait for is one kernel after another, so this does what ``triton_store`` and ``triton_decode`` do:
norm, rotation, storing and attention, and the last of the programs that share a row to arrive merges what they found.
Cached keys and values are on their way before the projection is known. Softmax is in base 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.worker.attention.base import RotatingAttentionStep
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.triton_decode import as_dtype
from services.worker.attention.triton_store import rounded
from services.worker.described.config import Windows
from services.worker.layers.fp8 import LARGEST
from services.worker.layers.triton_overlap import overlapping, overlaps

MOST_ROWS = 16
_LOG2_E = 1.4426950408889634
_SMALLEST_DOT = 16  # the smallest side of a matrix product
_PROGRAMS = 3 * 132  # enough to keep every multiprocessor of the chips we know busy
_MOST_SPLITS = 32
_MERGED = 8192  # numbers that are merged at once


class FewOptions(NamedTuple):
    """How the kernel is built."""

    tile: int  # tokens read at once, a power of two, at least 16
    warps: int
    share: int  # tokens of the longest context that are worth a program, if there are not too many programs


def choose_options(head_dim: int) -> FewOptions:
    """For heads of ``head_dim``."""
    return FewOptions(max(16, min(128, 8192 // head_dim)), 4, 128)


def choose_splits(rows: int, kv_heads: int, longest: int, head_dim: int) -> int:
    """Programs that share one row's context of at most ``longest`` tokens."""
    worth: int = triton.cdiv(longest - 1, choose_options(head_dim).share)
    return max(1, min(_PROGRAMS // (rows * kv_heads), worth, _MOST_SPLITS))


def no_arrivals(kv_heads: int, device: torch.device) -> torch.Tensor:
    """``[MOST_ROWS * kv_heads]`` int32: how many of the programs that share a row and kv head are through with it.
    Zeros again after each layer, so that all steps of a stream can have the same."""
    return torch.zeros(MOST_ROWS * kv_heads, dtype=torch.int32, device=device)


class FewRowsStep(RotatingAttentionStep):
    """A step of up to ``MOST_ROWS`` rows of one token, layer by layer: launches only."""

    def __init__(
        self,
        cache: KvCache,
        heads: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        token_slots: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        arrivals: torch.Tensor,
        windows: Windows,
        splits: Sequence[int],
    ) -> None:
        """``tables``: cosines and sines as of ``Rotary``. ``arrivals``: of ``no_arrivals``. ``windows`` and ``splits``:
        of each layer. The others as in ``few_attention``."""
        self._cache, self._heads, self._tables = cache, heads, tables
        self._tokens, self._arrivals = (token_slots, positions, page_table), arrivals
        self._windows, self._splits = windows, splits

    def run_qkv(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        keys, values = self._cache.keys[layer_index], self._cache.values[layer_index]
        output = qkv.new_empty((qkv.shape[0], self._heads, keys.shape[-1]))
        norms: tuple[torch.Tensor, torch.Tensor] | None
        norms = None if q_norm is None else (q_norm, k_norm)  # type: ignore[assignment]  # both or neither
        few_attention(
            qkv,
            *self._tokens,
            self._tables,
            norms,
            eps,
            keys,
            values,
            output,
            self._arrivals,
            window=self._windows[layer_index],
            splits=self._splits[layer_index],
        )
        return output.flatten(1)


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
    key = tl.load(keys + rows[None, :] + dims[:, None], seen[None, :], other=0.0)
    value = tl.load(values + rows[:, None] + dims[None, :], seen[:, None], other=0.0)
    return key, value


@triton.jit
def _turned(places, inside, weight, eps, cosines, sines, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """The heads at ``places [heads, 1]``, normed and rotated, ``[heads, HEAD_DIM]`` float32."""
    dims = tl.arange(0, HEAD_DIM)
    facing = (dims + HEAD_DIM // 2) % HEAD_DIM
    found = tl.load(places + dims[None, :], inside, other=0.0).to(tl.float32)
    other = tl.load(places + facing[None, :], inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(found * found, axis=1) / HEAD_DIM + eps)[:, None]
        found = found * inverse * tl.load(weight + dims).to(tl.float32)[None, :]
        other = other * inverse * tl.load(weight + facing).to(tl.float32)[None, :]
    # The sines of the first half are negative in the table.
    return found * cosines[None, :] + other * sines[None, :]


@triton.jit
def _merge(partial, lse, output, first, sharing, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
           HEAD_DIM: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """What ``sharing`` programs, the first of which wrote at ``first``, found for ``GROUP`` heads at ``output``."""
    members, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_DIM)
    inside = members < GROUP
    peak = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    sums = tl.zeros((GROUP_PADDED, HEAD_DIM), tl.float32)
    for start in range(0, sharing, AT_ONCE):
        parts = start + tl.arange(0, AT_ONCE)
        real = (parts < sharing)[:, None]
        given = real & inside[None, :]
        places = (first + parts)[:, None] * GROUP + members[None, :]
        # Past the first-level cache, which does not know what other multiprocessors wrote.
        logs = tl.load(lse + places, given, other=0.0, cache_modifier=".cg")
        numbers = partial + places[:, :, None] * HEAD_DIM + dims[None, None, :]
        found = tl.load(numbers, given[:, :, None], other=0.0, cache_modifier=".cg")
        logs = tl.where(real, logs, float("-inf"))
        higher = tl.maximum(peak, tl.max(logs, axis=0))
        weights = tl.exp2(logs - higher[None, :])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * found, axis=0)
        peak = higher
    target = output + members[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, (sums / total[:, None]).to(output.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["splits", "table_stride", "window"])
def _attend(
    qkv,
    token_slots,
    positions,
    page_table,
    cos,
    sin,
    q_norm,
    k_norm,
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
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid ``(rows * kv_heads, splits)``. The first program of a row and head also stores the row's own token.
    ``WINDOWED``: a row attends to its last ``window`` tokens, its own included."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    if OVERLAP:
        gdc_launch_dependents()
    both = tl.program_id(0)
    row, head, split = (both // KV_HEADS).to(tl.int64), both % KV_HEADS, tl.program_id(1)
    slot, position = tl.load(token_slots + row), tl.load(positions + row)
    members, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_DIM)
    inside = (members < GROUP)[:, None]
    target = output + (row * HEADS + head * GROUP) * HEAD_DIM
    # By the row's own length, which only the device knows: splits of a short row may have nothing to do.
    oldest = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    cached = position - oldest
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, TILE), splits), 1) * TILE if SPLIT else tl.maximum(cached, 1)
    sharing = tl.maximum(tl.cdiv(cached, share), 1)
    if (slot < 0) | (split >= sharing):
        if OVERLAP:
            gdc_wait()
        if split == 0:
            nothing = tl.zeros((GROUP_PADDED, HEAD_DIM), output.dtype.element_ty)
            tl.store(target + members[:, None] * HEAD_DIM + dims[None, :], nothing, inside)
        return

    begin = oldest + split * share
    end = tl.minimum(position, begin + share)
    table = page_table + slot.to(tl.int64) * table_stride
    head_place = head * (PAGE * HEAD_DIM)
    own_page = tl.load(table + position // PAGE).to(tl.int64)
    key, value = _read(keys, values, table, head_place, begin, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)
    angles = position.to(tl.int64) * HEAD_DIM + dims
    cosines, sines = tl.load(cos + angles), tl.load(sin + angles)
    if OVERLAP:
        gdc_wait()

    source = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    places = source + (head * GROUP + members)[:, None] * HEAD_DIM
    query = _turned(places, inside, q_norm, eps, cosines, sines, HEAD_DIM, NORM).to(qkv.dtype.element_ty)
    one = tl.arange(0, 1)[:, None]
    places = source + (HEADS + head + one) * HEAD_DIM
    own_key = _turned(places, one == 0, k_norm, eps, cosines, sines, HEAD_DIM, NORM)
    own_value = tl.load(source + (HEADS + KV_HEADS + head + one) * HEAD_DIM + dims[None, :])
    own_key = rounded(own_key, keys.dtype.element_ty, LARGEST)
    own_value = rounded(own_value, values.dtype.element_ty, LARGEST)
    first = split == 0
    stored = own_page * PAGE_STRIDE + head_place + (position % PAGE) * HEAD_DIM + one * HEAD_DIM + dims[None, :]
    tl.store(keys + stored, own_key, first & (one == 0))
    tl.store(values + stored, own_value, first & (one == 0))

    score = tl.sum(query.to(tl.float32) * own_key.to(tl.float32), axis=1) * scale
    peak = tl.where(first, score, float("-inf"))
    total = tl.where(first, 1.0, 0.0) + tl.zeros((GROUP_PADDED,), tl.float32)
    sums = tl.where(first, own_value.to(tl.float32), 0.0) + tl.zeros((GROUP_PADDED, HEAD_DIM), tl.float32)
    for start in range(begin, end, TILE):
        scores = tl.dot(query, as_dtype(key, query.dtype), input_precision="ieee") * scale
        scores = tl.where((start + tl.arange(0, TILE) < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        value = as_dtype(value, query.dtype)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
        peak = higher
        key, value = _read(keys, values, table, head_place, start + TILE, end, PAGE_STRIDE, HEAD_DIM, PAGE, TILE)

    result = sums / total[:, None]
    if sharing == 1:
        tl.store(target + members[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), inside)
    elif SPLIT:
        place = (both * splits + split) * GROUP + members
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], result, inside)
        tl.store(lse + place, peak + tl.log2(total), members < GROUP)
        tl.debug_barrier()  # all threads have written what the arrival is to announce
        if tl.atomic_add(arrivals + both, 1, sem="acq_rel") == sharing - 1:
            _merge(partial, lse, target, both * splits, sharing, GROUP, GROUP_MERGED, HEAD_DIM, AT_ONCE)
            tl.store(arrivals + both, 0)


def few_attention(
    qkv: torch.Tensor,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    window: int | None = None,
    splits: int,
    options: FewOptions | None = None,
) -> None:
    """What ``rotate_and_store`` and ``decode_attention`` do one after the other, with their arguments, for rows whose
    other tokens were cached by earlier steps; ``qkv`` in bfloat16 or float16. ``arrivals``: of ``no_arrivals``."""
    rows, heads, head_dim = output.shape
    _, kv_heads, page_size, _ = keys.shape
    group = heads // kv_heads
    merged = triton.next_power_of_2(group)
    tile, warps, _ = options or choose_options(head_dim)
    partial = lse = arrivals  # not read
    if splits > 1:
        partial = torch.empty((rows * kv_heads * splits * group, head_dim), dtype=torch.float32, device=qkv.device)
        lse = torch.empty(rows * kv_heads * splits * group, dtype=torch.float32, device=qkv.device)
    overlap = overlaps(qkv.device)
    q_norm, k_norm = norms or (qkv, qkv)
    _attend[(rows * kv_heads, splits)](
        qkv, token_slots, positions, page_table, *tables, q_norm, k_norm, keys, values, output, partial, lse, arrivals,
        page_table.stride(0), splits, window or 0, eps, _LOG2_E / head_dim**0.5, HEADS=heads, KV_HEADS=kv_heads,
        GROUP_PADDED=max(_SMALLEST_DOT, merged), GROUP_MERGED=merged, HEAD_DIM=head_dim, PAGE=page_size, TILE=tile,
        NORM=norms is not None, WINDOWED=window is not None, SPLIT=splits > 1,
        AT_ONCE=max(1, min(_MOST_SPLITS, _MERGED // (merged * head_dim))), LARGEST=LARGEST, OVERLAP=overlap,
        num_warps=warps, num_stages=1, **overlapping(overlap),
    )  # fmt: skip
