"""The kernel of ``triton_skinny``: few rows times weights that are read once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.worker.layers.triton_overlap import load_in_place


@triton.jit
def _early(pointers, inside, OVERLAP: tl.constexpr):
    return load_in_place(pointers, inside) if OVERLAP else tl.load(pointers, inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def product(
    x,
    weight,
    weight_scale,
    bias,
    norm,
    squares_before,
    out,
    handed,
    handed_norm,
    handed_squares,
    rows,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FULL: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    HANDED: tl.constexpr,
    HANDS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for ``BLOCK_OUT`` weight rows. Gated: rows of gate and up take turns in a tile.

    ``FULL``: there are ``ROWS`` rows, not fewer. ``SCALED``: ``weight`` is in fp8, with a scale for each of its rows.
    ``HANDED``: parts of ``squares_before``, 0 = ``x`` was not handed over. ``HANDS``: to hand ``out`` over. ``STAGES``:
    tiles in flight, less one. ``OVERLAP``: with the kernel before, and, once that has ended, with the one behind:
    programs of a third that only wait take more than they bring."""
    RESULTS: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    SIZE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    PART: tl.constexpr = BLOCK_IN // PARTS
    EVEN: tl.constexpr = INPUTS % BLOCK_IN == 0

    program = tl.program_id(0)
    lines = tl.arange(0, BLOCK_OUT)
    if GATED:
        column = tl.minimum(program * RESULTS + lines // 2, SIZE - 1)
        source = column + (lines % 2) * SIZE
    else:
        source = tl.minimum(program * RESULTS + lines, SIZE - 1)
    members = tl.arange(0, ROWS)
    columns = program * RESULTS + tl.arange(0, RESULTS)
    places_out = members[None, :] * SIZE + columns[:, None]
    kept = (members < rows)[None, :] & (columns < SIZE)[:, None]
    # What the end needs is loaded long before, so that nobody waits for it then.
    if HANDS:
        next_scale = _early(handed_norm + columns, columns < SIZE, OVERLAP)
    if SCALED:
        weight_scales = tl.load(weight_scale + source)
    if BIAS:
        offset = _early(bias + source, source >= 0, OVERLAP)
    # A warp multiplies a part of the inputs: else all would read the same weights from shared memory.
    places = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    weight_places = weight + source.to(tl.int64)[None, :, None] * INPUTS + places[:, None, :]
    x_places = x + members[None, None, :] * INPUTS + places[:, :, None]
    inside_rows = (members < rows)[None, None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if ADD:
        before = _early(out + places_out, kept, OVERLAP)
    if HANDED > 0:
        PADDED: tl.constexpr = triton.next_power_of_2(HANDED)
        givers = tl.arange(0, PADDED)
        given = (givers < HANDED)[:, None] & (members < rows)[None, :]
        known_squares = tl.load(squares_before + givers[:, None] * rows + members[None, :], given, other=0.0)

    parts = tl.zeros((PARTS, BLOCK_OUT, ROWS), tl.float32)
    squares = tl.zeros((PARTS, PART, ROWS), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
        inside = start + places < INPUTS
        if EVEN:
            tile = tl.load(weight_places + start)
            values = tl.load(x_places + start, None if FULL else inside_rows, other=None if FULL else 0.0)
        else:
            tile = tl.load(weight_places + start, inside[:, None, :], other=0.0)
            values = tl.load(x_places + start, inside_rows & inside[:, :, None], other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + start + places, inside, other=0.0).to(tl.float32)
            values = (wide * scale[:, :, None]).to(values.dtype)
        parts = tl.dot(tile.to(values.dtype), values, parts)
    total = tl.sum(parts, axis=0)
    if SCALED:
        total *= weight_scales[:, None]

    if NORM or HANDED > 0:
        # The length of a row is the same factor for all its inputs.
        square = tl.sum(known_squares, axis=0) if HANDED > 0 else tl.sum(tl.sum(squares, axis=0), axis=0)
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
    tl.store(out + places_out, result, kept)
    if HANDS:
        wide_result = tl.where(kept, result.to(tl.float32), 0.0)
        tl.store(handed + places_out, (wide_result * next_scale[:, None]).to(result.dtype), kept)
        mine = handed_squares + program * rows + members
        tl.store(mine, tl.sum(wide_result * wide_result, axis=0), members < rows)
