"""Matrix products of up to 16 rows, where only the time in which the weights arrive counts.

A program streams all inputs of a few outputs. The norm before a product, the gate of an MLP and the residual sum are
done within: beside such a product every launch costs as much as megabytes of weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 16
# The smallest side of a matrix product that rows can be.
_SMALLEST_DOT = 8
_CHUNK: tl.constexpr = tl.constexpr(1024)  # bytes that one instruction asks for ahead of time
# Of each weight row's beginning, asked for while the kernel before still runs.
_OWN_BYTES = 4096


class SkinnyOptions(NamedTuple):
    """How the kernel is built; sizes are powers of two."""

    outputs: int  # weight rows of a program, at least 16; half as many results where they are gated
    inputs: int  # read at once, all warps together
    split: int  # parts of ``inputs`` that are multiplied apart, best one a warp; 0 = no tensor cores
    warps: int
    stages: int  # tiles in flight


class Handed(NamedTuple):
    """A residual stream on its way into a norm: what can be done of it column by column is done."""

    values: torch.Tensor  # [rows, size], times the norm's weight
    squares: torch.Tensor  # [parts, rows] float32; their sum over parts is that of the stream's squares


class Ahead(NamedTuple):
    """Weights that a later kernel reads, brought to the L2 cache as soon as this one has read its own."""

    weight: torch.Tensor  # contiguous
    bytes: int  # of its beginning; whole KiB are taken


def choose_options(outputs: int, inputs: int) -> SkinnyOptions:
    """For ``weight [outputs, inputs]``, gated or not."""
    if outputs >= 8192:
        return SkinnyOptions(32, min(256, triton.next_power_of_2(inputs)), 4, 4, 4)
    return SkinnyOptions(16, min(512, triton.next_power_of_2(inputs)), 4, 4, 4)


@triton.jit
def _prefetch(addresses, wanted):
    """Ask the L2 cache for ``_CHUNK`` bytes at each of ``addresses`` (int64, multiples of 16) that is ``wanted``."""
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0;"
        " @wanted cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_share(matrix, CHUNKS: tl.constexpr, THREADS: tl.constexpr):
    """This program's share of the first ``CHUNKS`` chunks of ``matrix``."""
    start = matrix.to(tl.int64)
    programs = tl.num_programs(0)
    for first in range(tl.program_id(0) * THREADS, CHUNKS, programs * THREADS):
        chunks = first + tl.arange(0, THREADS)
        _prefetch(start + chunks.to(tl.int64) * _CHUNK, chunks < CHUNKS)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    norm,
    squares_before,
    out,
    handed,
    handed_norm,
    handed_squares,
    ahead,
    further,
    rows,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr,
    FULL: tl.constexpr,
    NORM: tl.constexpr,
    HANDED: tl.constexpr,
    HANDS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    OWN: tl.constexpr,
    AHEAD: tl.constexpr,
    FURTHER: tl.constexpr,
    THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program for ``BLOCK_OUT`` weight rows. Gated: rows of gate and up take turns in a tile.

    ``HANDED``: parts of ``squares_before``, 0 = ``x`` was not handed over. ``HANDS``: to hand ``out`` over."""
    RESULTS: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    SIZE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    PARTS: tl.constexpr = SPLIT if SPLIT > 0 else 1
    PART: tl.constexpr = BLOCK_IN // PARTS
    EVEN: tl.constexpr = INPUTS % BLOCK_IN == 0

    lines = tl.arange(0, BLOCK_OUT)
    if GATED:
        column = tl.minimum(tl.program_id(0) * RESULTS + lines // 2, SIZE - 1)
        source = column + (lines % 2) * SIZE
    else:
        source = tl.minimum(tl.program_id(0) * RESULTS + lines, SIZE - 1)
    sources = source.to(tl.int64) * INPUTS
    members = tl.arange(0, ROWS)

    if PDL:
        # The weights depend on nobody: they are under way before the kernel before has ended.
        gdc_launch_dependents()
        if OWN > 0:
            own = (weight + sources).to(tl.int64)[:, None] + (tl.arange(0, OWN) * _CHUNK).to(tl.int64)[None, :]
            _prefetch(own, own != 0)
        gdc_wait()
    columns = tl.program_id(0) * RESULTS + tl.arange(0, RESULTS)
    targets = out + members[None, :] * SIZE + columns[:, None]
    kept = (members < rows)[None, :] & (columns < SIZE)[:, None]
    if ADD:
        # Long before it is needed, so that nobody waits for it in the end.
        before = tl.load(targets, kept, other=0.0).to(tl.float32)
    if HANDS:
        next_scale = tl.load(handed_norm + columns, columns < SIZE, other=0.0).to(tl.float32)
    if HANDED > 0:
        PADDED: tl.constexpr = triton.next_power_of_2(HANDED)
        givers = tl.arange(0, PADDED)
        given = (givers < HANDED)[:, None] & (members < rows)[None, :]
        known_squares = tl.load(squares_before + givers[:, None] * rows + members[None, :], given, other=0.0)
    if BIAS:
        offset = tl.load(bias + source).to(tl.float32)

    if SPLIT == 0:
        places = tl.arange(0, BLOCK_IN)
        weight_places = weight + sources[:, None] + places[None, :]
        x_places = x + members[:, None] * INPUTS + places[None, :]
        inside_rows = (members < rows)[:, None]
        sums = tl.zeros((ROWS, BLOCK_OUT, BLOCK_IN), tl.float32)
        squares = tl.zeros((ROWS, BLOCK_IN), tl.float32)
        for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            inside = start + places < INPUTS
            if EVEN:
                tile = tl.load(weight_places + start)
                values = tl.load(x_places + start, inside_rows, other=0.0).to(tl.float32)
            else:
                tile = tl.load(weight_places + start, inside[None, :], other=0.0)
                values = tl.load(x_places + start, inside_rows & inside[None, :], other=0.0).to(tl.float32)
            if NORM:
                squares += values * values
                scale = tl.load(norm + start + places, inside, other=0.0).to(tl.float32)
                values = values * scale[None, :]
            sums += tile.to(tl.float32)[None, :, :] * values[:, None, :]
        total = tl.trans(tl.sum(sums, axis=2))
        square = tl.sum(squares, axis=1)
    elif SPLIT == 1:
        places = tl.arange(0, BLOCK_IN)
        weight_places = weight + sources[:, None] + places[None, :]
        x_places = x + members[None, :] * INPUTS + places[:, None]
        inside_rows = (members < rows)[None, :]
        total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
        squares = tl.zeros((BLOCK_IN, ROWS), tl.float32)
        for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            inside = start + places < INPUTS
            if EVEN:
                tile = tl.load(weight_places + start)
            else:
                tile = tl.load(weight_places + start, inside[None, :], other=0.0)
            if EVEN and FULL:
                values = tl.load(x_places + start)
            else:
                values = tl.load(x_places + start, inside_rows & inside[:, None], other=0.0)
            if NORM:
                wide = values.to(tl.float32)
                squares += wide * wide
                scale = tl.load(norm + start + places, inside, other=0.0).to(tl.float32)
                values = (wide * scale[:, None]).to(values.dtype)
            total = tl.dot(tile, values, total)
        square = tl.sum(squares, axis=0)
    else:
        # A warp multiplies a part of the inputs: else all would read the same weights from shared memory.
        places = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
        weight_places = weight + sources[None, :, None] + places[:, None, :]
        x_places = x + members[None, None, :] * INPUTS + places[:, :, None]
        inside_rows = (members < rows)[None, None, :]
        parts = tl.zeros((PARTS, BLOCK_OUT, ROWS), tl.float32)
        squares = tl.zeros((PARTS, PART, ROWS), tl.float32)
        for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            inside = start + places < INPUTS
            if EVEN:
                tile = tl.load(weight_places + start)
            else:
                tile = tl.load(weight_places + start, inside[:, None, :], other=0.0)
            if EVEN and FULL:
                values = tl.load(x_places + start)
            else:
                values = tl.load(x_places + start, inside_rows & inside[:, :, None], other=0.0)
            if NORM:
                wide = values.to(tl.float32)
                squares += wide * wide
                scale = tl.load(norm + start + places, inside, other=0.0).to(tl.float32)
                values = (wide * scale[:, :, None]).to(values.dtype)
            parts = tl.dot(tile, values, parts)
        total = tl.sum(parts, axis=0)
        square = tl.sum(tl.sum(squares, axis=0), axis=0)

    if AHEAD > 0:
        _prefetch_share(ahead, AHEAD, THREADS)
    if FURTHER > 0:
        _prefetch_share(further, FURTHER, THREADS)

    if HANDED > 0:
        square = tl.sum(known_squares, axis=0)
    if NORM or HANDED > 0:
        # The length of a row is the same factor for all its inputs.
        total = total * tl.rsqrt(square / INPUTS + eps)[None, :]
    if BIAS:
        total += offset[:, None]
    if GATED:
        # As much rounding as where a kernel of its own gates.
        pairs = tl.permute(tl.reshape(total.to(out.dtype.element_ty), (RESULTS, 2, ROWS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        gate = gate.to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    if ADD:
        total += before
    result = total.to(out.dtype.element_ty)
    tl.store(targets, result, kept)
    if HANDS:
        wide_result = tl.where(kept, result.to(tl.float32), 0.0)
        places_out = members[None, :] * SIZE + columns[:, None]
        tl.store(handed + places_out, (wide_result * next_scale[:, None]).to(result.dtype), kept)
        mine = handed_squares + tl.program_id(0) * rows + members
        tl.store(mine, tl.sum(wide_result * wide_result, axis=0), members < rows)


def skinny_product(
    x: torch.Tensor | Handed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    onto: torch.Tensor | None = None,
    ahead: tuple[Ahead, ...] = (),
    options: SkinnyOptions | None = None,
    pdl: bool = False,
    own_bytes: int = _OWN_BYTES,
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias``: ``x [rows, inputs]``, ``weight [outputs, inputs]``, ``bias [outputs]``, all
    contiguous and of one dtype (bfloat16 or float16; sums are float32); up to ``MOST_ROWS`` rows.

    ``norm``: weight ``[inputs]`` and eps of an RMS norm of ``x`` before; the norm that ``x`` was handed to, if it was.
    ``gated``: ``silu(first half) * second half`` of the outputs. ``onto [rows, outputs]``: where to add the result in
    place (``x`` itself it cannot be); it is returned then. ``ahead``: up to two. ``pdl``: start while the kernel before
    ends, and let the next one do so; sm_90 and later, and the next one must be an ordinary kernel or wait for this one
    itself. ``own_bytes``: of each weight row, asked for before that wait.
    """
    if isinstance(x, Handed) and norm is None:
        raise ValueError("x was handed to a norm: say which")
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    rows = (x.values if isinstance(x, Handed) else x).shape[0]
    out = weight.new_empty((rows, size)) if onto is None else onto
    _launch(x, weight, bias, norm, gated, out, onto is not None, None, ahead, options, pdl, own_bytes)
    return out


def skinny_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    onto: torch.Tensor,
    next_norm: torch.Tensor,
    *,
    options: SkinnyOptions | None = None,
    pdl: bool = False,
    own_bytes: int = _OWN_BYTES,
) -> Handed:
    """``skinny_product`` added to ``onto``, which is then handed to the norm of weight ``next_norm [outputs]``."""
    built = options or choose_options(*weight.shape)
    parts = triton.cdiv(weight.shape[0], built.outputs)
    squares = torch.empty((parts, x.shape[0]), dtype=torch.float32, device=x.device)
    handed = Handed(torch.empty_like(onto), squares)
    _launch(x, weight, bias, None, False, onto, True, (next_norm, handed), (), built, pdl, own_bytes)
    return handed


def _launch(
    x: torch.Tensor | Handed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
    hand: tuple[torch.Tensor, Handed] | None,
    ahead: tuple[Ahead, ...],
    options: SkinnyOptions | None,
    pdl: bool,
    own_bytes: int,
) -> None:
    values, squares = x if isinstance(x, Handed) else (x, None)
    (rows, inputs), (outputs, _), size = values.shape, weight.shape, out.shape[1]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows: 1 to {MOST_ROWS} can be multiplied here")
    built = options or choose_options(outputs, inputs)
    padded = triton.next_power_of_2(rows)
    if built.split:
        padded = max(_SMALLEST_DOT, padded)
    scale, eps = norm or (values, 0.0)
    next_norm, handed = hand or (values, Handed(out, out))
    prefetched = [*((each.weight, each.bytes // _CHUNK.value) for each in ahead), (values, 0), (values, 0)][:2]
    row_bytes = inputs * weight.element_size()
    # A chunk must neither be unaligned nor reach beyond the last row.
    own = min(own_bytes, row_bytes) // _CHUNK.value if pdl and row_bytes % 16 == 0 else 0
    _product[(triton.cdiv(size, built.outputs // 2 if gated else built.outputs),)](
        values, weight, values if bias is None else bias, scale, values if squares is None else squares, out,
        handed.values, next_norm, handed.squares, prefetched[0][0], prefetched[1][0], rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, ROWS=padded, BLOCK_OUT=built.outputs, BLOCK_IN=built.inputs, SPLIT=built.split,
        FULL=rows == padded, NORM=norm is not None and squares is None, HANDED=0 if squares is None else len(squares),
        HANDS=hand is not None, GATED=gated, BIAS=bias is not None, ADD=add, PDL=pdl,
        OWN=1 << own.bit_length() >> 1, AHEAD=prefetched[0][1], FURTHER=prefetched[1][1], THREADS=32 * built.warps,
        STAGES=built.stages, num_warps=built.warps, num_stages=built.stages,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
