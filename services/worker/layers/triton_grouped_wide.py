"""Kernels of ``triton_grouped`` for more rows: products with the tensor cores of Hopper, and dequantization."""

import triton
import triton.language as tl

from services.worker.layers.triton_unpack import high_halves, low_halves, whole_bytes


@triton.jit
def _scaled(values, scale, offset, OFFSETS: tl.constexpr):
    """Return ``values * scale + offset``, computed in float32 and rounded to the dtype of ``values``."""
    wide = values.to(tl.float32) * scale[:, None]
    if OFFSETS:
        wide += offset[:, None]
    return wide.to(values.dtype)


@triton.jit(do_not_specialize=["rows"])
def grouped_tiles(
    x,
    codes,
    scales,
    offsets,
    bias,
    out,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply ``ROWS`` rows by ``BLOCK_OUT`` weight rows. Grid: ``(blocks of rows, blocks of outputs, SPLITS)``.

    With several ``SPLITS``, each computes the sum over a part of the inputs, and ``out`` is ``[SPLITS, rows, OUTPUTS]``
    float32 without bias. ``SCALE_SUMS``: scale the sums over the inputs of a tile instead of the weights. The other
    parameters are those of ``grouped_rows``.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = TILE * BITS // 8
    PAIRED: tl.constexpr = GROUP < TILE
    STEPS: tl.constexpr = (INPUTS // TILE + SPLITS - 1) // SPLITS * TILE

    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    source = tl.minimum(columns, OUTPUTS - 1)
    members = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    places = tl.arange(0, WIDTH)
    code_pointers = codes + source.to(tl.int64)[:, None] * (INPUTS * BITS // 8) + places[None, :]
    x_pointers = x + members.to(tl.int64)[None, :] * INPUTS + places[:, None]
    inside = (members < rows)[None, :]
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    first = split * STEPS
    for start in tl.range(first, min(first + STEPS, INPUTS), TILE, num_stages=STAGES):
        group = start // GROUP * OUTPUTS + source
        packed = tl.load(code_pointers + start * BITS // 8)
        scale = tl.load(scales + group)
        offset = tl.load(offsets + group) if OFFSETS else scale
        values = tl.load(x_pointers + start, inside, other=0.0)
        if BITS == 8:
            weights = whole_bytes(packed, DTYPE, ASM)
            if SCALE_SUMS:
                total += tl.dot(weights, values) * scale[:, None]
            else:
                total = tl.dot(_scaled(weights, scale, offset, OFFSETS), values, total)
        else:
            seconds = tl.load(x_pointers + start + WIDTH, inside, other=0.0)
            low, high = low_halves(packed, DTYPE, ASM), high_halves(packed, DTYPE, ASM)
            if PAIRED:
                second_scale = tl.load(scales + group + OUTPUTS)
                second_offset = tl.load(offsets + group + OUTPUTS) if OFFSETS else second_scale
            else:
                second_scale, second_offset = scale, offset
            if SCALE_SUMS:
                if PAIRED:
                    total += tl.dot(low, values) * scale[:, None]
                    total += tl.dot(high, seconds) * second_scale[:, None]
                else:
                    total += tl.dot(high, seconds, tl.dot(low, values)) * scale[:, None]
            else:
                total = tl.dot(_scaled(low, scale, offset, OFFSETS), values, total)
                total = tl.dot(_scaled(high, second_scale, second_offset, OFFSETS), seconds, total)
    if BIAS:
        total += tl.load(bias + source).to(tl.float32)[:, None]
    out_rows = split.to(tl.int64) * rows + members
    kept = (members < rows)[None, :] & (columns < OUTPUTS)[:, None]
    tl.store(out + out_rows[None, :] * OUTPUTS + columns[:, None], total.to(out.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["count"])
def grouped_sum(parts, bias, out, count, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Add the sums of ``grouped_tiles`` to results of ``count`` elements. Grid: ``(blocks of elements,)``."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count.to(tl.int64) + places, inside, other=0.0)
    if BIAS:
        total += tl.load(bias + places % OUTPUTS).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), inside)


@triton.jit
def grouped_dequantize(
    codes,
    scales,
    offsets,
    out,
    first,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write the weights of outputs from ``first`` to ``out [outputs, INPUTS]``. Grid: ``(outputs blocks, tiles)``."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = TILE * BITS // 8
    lines = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    source, start = first + lines, tl.program_id(1) * TILE
    inside, places = source < OUTPUTS, tl.arange(0, WIDTH)
    code_pointers = codes + source.to(tl.int64)[:, None] * (INPUTS * BITS // 8) + start * BITS // 8 + places[None, :]
    packed = tl.load(code_pointers, inside[:, None], other=0)
    group = start // GROUP * OUTPUTS + source
    scale = tl.load(scales + group, inside, other=0.0)
    offset = tl.load(offsets + group, inside, other=0.0) if OFFSETS else scale
    out_pointers = out + lines.to(tl.int64)[:, None] * INPUTS + start + places[None, :]
    if BITS == 8:
        tl.store(out_pointers, _scaled(whole_bytes(packed, DTYPE, ASM), scale, offset, OFFSETS), inside[:, None])
    else:
        tl.store(out_pointers, _scaled(low_halves(packed, DTYPE, ASM), scale, offset, OFFSETS), inside[:, None])
        if GROUP < TILE:
            scale = tl.load(scales + group + OUTPUTS, inside, other=0.0)
            offset = tl.load(offsets + group + OUTPUTS, inside, other=0.0) if OFFSETS else scale
        high = _scaled(high_halves(packed, DTYPE, ASM), scale, offset, OFFSETS)
        tl.store(out_pointers + WIDTH, high, inside[:, None])
