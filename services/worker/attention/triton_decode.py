"""Attention of rows of one token each over their pages: bound by memory, so written for bytes in flight and for few
instructions beside them.

A program takes the query heads of one kv head of one row together, so that keys and values are read once. Tokens are
the long side of both products, ``keys x queries`` and ``values transposed x weights``, so that a group of four queries
is padded to 8 and not to 16. Keys and values of fp8 are multiplied as float16, which holds them exactly, and weights of
at most 1 better than bfloat16 does. Softmax is in base 2, and so are all log-sum-exps here.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from services.worker.layers.fp8 import FP8

_LOG2_E = 1.4426950408889634
_SMALLEST_COLUMNS = 8  # of a matrix product
# Triton's interpreter knows no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
MAX_SPLITS = 32
# Up to so many tokens a second kernel costs more than going through them one after the other.
_UNSPLIT = 256
_SMALLEST_SPLIT = 64  # tokens
# A step with a longer context waits for the programs of that one, however many others there are.
LONG = 4096
_BUSY = 256  # programs that keep every multiprocessor of the chips we know busy: only fewer are split
_FEW_PROGRAMS = 1024  # up to so many are built for latency, and splitting makes at most so many
_LONG_PROGRAMS = 8192  # splitting long contexts makes at most so many


class DecodeOptions(NamedTuple):
    """How the kernel is built."""

    tile: int  # tokens read at once, a power of two, at least 16
    warps: int
    stages: int  # tiles in shared memory, and one more


class PrefixState(NamedTuple):
    """Attention over the shared prefixes, of which the rows' own tokens take it from there."""

    tokens: torch.Tensor  # [rows] int32, multiples of page_size; 0 = none, the other two are not read then
    output: torch.Tensor  # [rows, heads, head_dim]
    lse: torch.Tensor  # [rows, heads] float32, base 2


# For heads of up to 64 dimensions, and for wider ones. Throughput: on an H200 a cache of bf16 gets 99 % of what a copy
# gets, from 110 tokens a row on, and one of fp8 takes 54 % of that time.
_MANY = DecodeOptions(32, 1, 3), DecodeOptions(16, 1, 3)
# Latency; a tile is the smallest split.
_FEW = DecodeOptions(64, 4, 3), DecodeOptions(64, 4, 2)
# Without tensor cores all that a product takes has to fit the registers.
_FLOAT32 = DecodeOptions(16, 4, 2)


def decode_options(programs: int, head_dim: int, dtype: torch.dtype) -> DecodeOptions:
    """For so many programs, which is rows times kv heads; ``dtype``: of the queries."""
    if dtype == torch.float32:
        return _FLOAT32
    return (_FEW if programs <= _FEW_PROGRAMS else _MANY)[head_dim > 64]


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Programs that share one row's context of at most ``longest`` tokens."""
    programs, wanted = rows * kv_heads, 1
    if longest > LONG and programs <= _FEW_PROGRAMS:
        wanted = _LONG_PROGRAMS // programs
    elif longest > _UNSPLIT and programs < _BUSY:
        wanted = _FEW_PROGRAMS // programs
    return min(wanted, longest // _SMALLEST_SPLIT, MAX_SPLITS) if wanted > 1 else 1


@triton.jit
def as_dtype(found, dtype: tl.constexpr):
    """``found`` of a cache of fp8 as numbers to multiply with; of ``dtype`` already: as it is."""
    if dtype == tl.bfloat16 and found.dtype != dtype:
        # Straight to bf16 goes one by one through the unit that also takes exponentials.
        found = found.to(tl.float32)
    return found.to(dtype)


@triton.jit
def _bytes(pairs, ASSEMBLY: tl.constexpr):
    """The lower and the upper bytes of ``pairs``, int16, which are numbers of fp8, as float16."""
    if ASSEMBLY:
        # Two pairs at once. What the compiler makes of the other branch takes three times the instructions.
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
    """Of ``PAGES`` pages from token ``start`` on; 0 from ``end`` on."""
    pages = tl.arange(0, PAGES)
    return tl.load(table + start // PAGE + pages, start + pages * PAGE < end, other=0)


@triton.jit(do_not_specialize=["splits", "table_stride", "window"])
def _attend(
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
    SPLIT: tl.constexpr,
    PAIRS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Grid ``(rows * kv_heads, splits)``: the heads of a row are next to each other in memory. ``WINDOWED``: a row
    attends to its last ``window`` tokens; it has no ``PREFIX`` then. ``PAIRS``: keys and values are of fp8, and values
    come as pairs in int16, ``[page_count, kv_heads, page_size, head_dim // 2]``."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM  # of values, in elements
    # A tile is of whole pages, or a part of one.
    PAGES: tl.constexpr = TILE // PAGE if TILE > PAGE else 1
    SPAN: tl.constexpr = TILE // PAGES
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    members = tl.arange(0, COLUMNS)
    dims = tl.arange(0, HEAD_DIM)
    places = row * HEADS + head * GROUP + members
    heads = places[:, None] * HEAD_DIM + dims[None, :]
    # All that depends on the row only is on its way before anything waits, so padding is no reason to return.
    slot = tl.load(token_slots + row)
    end = tl.load(positions + row) + 1
    begin = 0
    if WINDOWED:
        # Tiles start where pages do, or parts of pages: the first may hold tokens before the window.
        first = tl.maximum(end - window, 0)
        begin = first // SPAN * SPAN
    if PREFIX:
        begin = tl.load(prefix_tokens + row)
    query = tl.load(queries + heads, (members < GROUP)[:, None], other=0.0)
    inside = (members < GROUP) & (slot >= 0)
    end = tl.where(slot >= 0, end, begin)
    if PREFIX:
        given = inside & (begin > 0) & (split == 0)
    if SPLIT:
        # By the row's own length, which only the device knows; the last splits of a short row have nothing to do.
        share = tl.cdiv(tl.cdiv(end - begin, TILE), splits) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)
    table = page_table + slot.to(tl.int64) * table_stride
    following = _page_ids(table, begin, end, PAGE, PAGES)
    if PREFIX:
        prefix_peak = tl.load(prefix_lse + places, given, other=float("-inf"))
        prefix_result = tl.load(prefix_output + heads, given[:, None], other=0.0)

    if PAIRS:
        # Queries are some hundreds at most; what is beyond float16 becomes its largest.
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    query = tl.trans(query)
    tokens = tl.arange(0, TILE)
    place = head * (PAGE * HEAD_DIM) + (tokens % SPAN) * HEAD_DIM
    keys += place[:, None] + dims[None, :]
    values += (place // (HEAD_DIM // WIDTH))[None, :] + tl.arange(0, WIDTH)[:, None]
    # Not infinite, since the difference of two infinities is no number.
    peak = tl.full((COLUMNS,), -1e30, tl.float32)
    totals = tl.zeros((TILE, COLUMNS), tl.float32)
    sums = tl.zeros((WIDTH, COLUMNS), tl.float32)
    if PAIRS:
        upper_sums = sums
    for start in range(begin, end, TILE):
        seen = tokens < end - start
        if WINDOWED:
            seen = seen & (tokens >= first - start)
        # Page ids are read once a page and a tile ahead, and an address is one multiplication and addition: all but the
        # page is in ``keys`` and ``values``.
        page = tl.reshape(tl.broadcast_to(following.to(tl.int64)[:, None], (PAGES, SPAN)), (TILE,))
        following = _page_ids(table, start + TILE, end, PAGE, PAGES)
        key_place, value_place = page * PAGE_STRIDE, page * (PAGE_STRIDE // HEAD_DIM * WIDTH)
        if SPAN < PAGE:
            key_place += start % PAGE * HEAD_DIM
            value_place += start % PAGE * WIDTH
        key_place, value_place = tl.multiple_of(key_place, HEAD_DIM), tl.multiple_of(value_place, WIDTH)
        key = tl.load(keys + key_place[:, None], seen[:, None], other=0.0)
        value = tl.load(values + value_place[None, :], seen[None, :], other=0.0)
        scores = tl.dot(as_dtype(key, query.dtype), query, input_precision="ieee")
        scores = tl.where(seen[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=0) * scale)
        weights = tl.exp2(scores * scale - higher[None, :])
        shrink = tl.exp2(peak - higher)[None, :]
        totals = totals * shrink + weights
        weights = weights.to(query.dtype)
        if PAIRS:
            value, upper = _bytes(value, ASSEMBLY)
            upper_sums = tl.dot(upper, weights, upper_sums * shrink)
        sums = tl.dot(as_dtype(value, query.dtype), weights, sums * shrink, input_precision="ieee")
        peak = higher

    total = tl.sum(totals, axis=0)
    result = tl.reshape(tl.trans(tl.join(sums, upper_sums), 1, 0, 2), (COLUMNS, HEAD_DIM)) if PAIRS else tl.trans(sums)
    if PREFIX:
        higher = tl.maximum(peak, prefix_peak)
        own, shared = tl.exp2(peak - higher), tl.exp2(prefix_peak - higher)
        total = total * own + shared
        result = result * own[:, None] + prefix_result.to(tl.float32) * shared[:, None]
        peak = higher
    if SPLIT:
        some = total > 0.0
        total = tl.where(some, total, 1.0)
        places = places * splits + split
        heads = places[:, None] * HEAD_DIM + dims[None, :]
        tl.store(lse + places, tl.where(some, peak + tl.log2(total), float("-inf")), inside)
    result = result * (1.0 / total)[:, None]
    tl.store(output + heads, result.to(output.dtype.element_ty), inside[:, None])


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
    window: int | None = None,
    splits: int = 1,
    options: DecodeOptions | None = None,
) -> None:
    """Attend each of the first ``rows`` (None = all) queries to its slot's tokens 0 to ``positions``, into ``output``;
    with a ``window``, to the last ``window`` of these tokens.

    ``queries`` and ``output [.., heads, head_dim]``, ``keys`` and ``values [page_count, kv_heads, page_size,
    head_dim]``, all contiguous and of one dtype, or keys and values of fp8; ``token_slots`` (-1 = padding: its output
    stays as it is) and ``positions [..]``, ``page_table [max_slots, max_pages]`` int32.
    Tokens of a row's ``prefix`` are not read again; a step with a ``window`` has none.
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
    pairs = keys.dtype == FP8 and queries.dtype != torch.float32
    _attend[(rows * kv_heads, splits)](
        queries, keys, values.view(torch.int16) if pairs else values, token_slots, positions, page_table, *state,
        target, lse, page_table.stride(0), splits, window or 0, _LOG2_E / head_dim**0.5, HEADS=heads, KV_HEADS=kv_heads,
        COLUMNS=max(_SMALLEST_COLUMNS, triton.next_power_of_2(heads // kv_heads)), HEAD_DIM=head_dim, PAGE=page_size,
        TILE=options.tile, PREFIX=prefix is not None, WINDOWED=window is not None, SPLIT=splits > 1, PAIRS=pairs,
        ASSEMBLY=_ASSEMBLY, num_warps=options.warps, num_stages=options.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows * heads,)](
            target, lse, token_slots, output, splits, HEADS=heads, HEAD_DIM=head_dim, MOST=MAX_SPLITS, num_warps=2
        )
