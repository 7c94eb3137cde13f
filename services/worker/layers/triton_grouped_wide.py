"""Kernels of ``triton_grouped`` for more rows: products on tensor cores, and dequantization.

Hopper has a faster kernel for most of these products, ``gluon_grouped``.
"""

import triton
import triton.language as tl

from services.worker.layers.triton_unpack import (
    high_floats,
    high_halves,
    low_floats,
    low_halves,
    ones_like,
    whole_bytes,
)


@triton.jit
def _scaled(values, scale, offset, OFFSETS: tl.constexpr):
    """Return ``values * scale + offset``, computed in float32 and rounded to the dtype of ``values``."""
    wide = values.to(tl.float32) * scale[:, None]
    if OFFSETS:
        wide += offset[:, None]
    return wide.to(values.dtype)


@triton.jit
def _add(total, weights, ones, values, scale, offset, OFFSETS: tl.constexpr, SCALE_SUMS: tl.constexpr):
    """Add the product of ``weights [outputs, inputs]`` of one group and ``values [inputs, rows]`` to ``total``."""
    if SCALE_SUMS:
        total += tl.dot(weights, values) * scale[:, None]
        if OFFSETS:
            total += tl.dot(ones, values) * offset[:, None]
    else:
        total = tl.dot(_scaled(weights, scale, offset, OFFSETS), values, total)
    return total


@triton.jit
def _load_scale(scales, FLOATS: tl.constexpr):
    """Load float32 scales, with ``FLOATS`` from their exponents of 8 bits."""
    scale = tl.load(scales)
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True) if FLOATS else scale


@triton.jit
def add_tile(total, codes, x, scales, offsets, inside, OUTPUTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
             TILE: tl.constexpr, OFFSETS: tl.constexpr, FLOATS: tl.constexpr, SCALE_SUMS: tl.constexpr,
             ASM: tl.constexpr):  # fmt: skip
    """Return ``total [outputs, rows]`` plus the product of a tile of ``TILE`` inputs.

    ``codes [outputs, bytes]`` and ``x [bytes, rows]`` are pointers to the tile, ``scales`` and ``offsets [outputs]`` to
    the factors of its first group. ``inside [1, rows]``: which rows exist. ``SCALE_SUMS``: scale the sums over the
    inputs of a tile instead of the weights. ``FLOATS``: weights are in MXFP4. ``OUTPUTS`` and the other parameters are
    those of ``grouped_rows``.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PAIRED: tl.constexpr = GROUP < TILE
    packed = tl.load(codes)
    scale = _load_scale(scales, FLOATS)
    offset = tl.load(offsets) if OFFSETS else scale
    values = tl.load(x, inside, other=0.0)
    # The tensor cores also compute the sums of the inputs, in the layout of the products.
    ones = ones_like(packed, DTYPE, ASM) if OFFSETS and SCALE_SUMS else packed
    if BITS == 8:
        total = _add(total, whole_bytes(packed, DTYPE, ASM), ones, values, scale, offset, OFFSETS, SCALE_SUMS)
    else:
        seconds = tl.load(x + TILE // 2, inside, other=0.0)
        if FLOATS:
            low, high = low_floats(packed, DTYPE, ASM), high_floats(packed, DTYPE, ASM)
        else:
            low, high = low_halves(packed, DTYPE, ASM), high_halves(packed, DTYPE, ASM)
        if SCALE_SUMS and not PAIRED:
            total += tl.dot(high, seconds, tl.dot(low, values)) * scale[:, None]
            if OFFSETS:
                total += tl.dot(ones, seconds, tl.dot(ones, values)) * offset[:, None]
        else:
            total = _add(total, low, ones, values, scale, offset, OFFSETS, SCALE_SUMS)
            if PAIRED:
                scale = _load_scale(scales + OUTPUTS, FLOATS)
                offset = tl.load(offsets + OUTPUTS) if OFFSETS else scale
            total = _add(total, high, ones, seconds, scale, offset, OFFSETS, SCALE_SUMS)
    return total


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
    float32 without bias. ``SCALE_SUMS`` is as in ``add_tile``. The other parameters are those of ``grouped_rows``.
    """
    WIDTH: tl.constexpr = TILE * BITS // 8
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
        total = add_tile(
            total, code_pointers + start * BITS // 8, x_pointers + start, scales + group, offsets + group, inside,
            OUTPUTS, BITS, GROUP, TILE, OFFSETS, False, SCALE_SUMS, ASM,
        )  # fmt: skip
    if BIAS:
        total += tl.load(bias + source).to(tl.float32)[:, None]
    out_rows = split.to(tl.int64) * rows + members
    kept = (members < rows)[None, :] & (columns < OUTPUTS)[:, None]
    tl.store(out + out_rows[None, :] * OUTPUTS + columns[:, None], total.to(out.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["count"])
def grouped_sum(parts, bias, out, count, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Add the sums of parts of the inputs to results of ``count`` elements. Grid: ``(blocks of elements,)``."""
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
