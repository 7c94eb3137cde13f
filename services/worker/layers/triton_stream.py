"""Kernels of ``triton_skinny`` for one row, without tensor cores and with little shared memory."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.worker.layers.triton_overlap import load_float_in_place


@triton.jit
def _sum(tile, values, scales, SCALED: tl.constexpr):
    """Return the sums of the rows of ``tile``, multiplied by ``values`` and, with ``SCALED`` > 1, by scales of blocks.

    ``scales [1, groups]`` are those of equal parts of a row.
    """
    products = tile.to(tl.float32) * values[None, :]
    if SCALED > 1:
        groups: tl.constexpr = scales.shape[1]
        parts = tl.reshape(products, (tile.shape[0], groups, tile.shape[1] // groups))
        return tl.sum(tl.sum(parts, axis=2) * scales, axis=1)
    return tl.sum(products, axis=1)


@triton.jit
def stream(
    x,
    weight,
    weight_scale,
    bias,
    norm,
    out,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    RESULTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute ``RESULTS`` results of a row in each program. Grid: ``(blocks of results,)``.

    A program requests all its weights before ``x`` is ready. ``WIDTH`` is ``INPUTS``, rounded up to a power of two. The
    other parameters are those of ``product``. If blocks have scales, the results of a program are in the same block.
    """
    # If blocks have scales, ``GROUPS`` is the number of columns of blocks in ``WIDTH``.
    GROUPS: tl.constexpr = WIDTH // SCALED if SCALED > 1 and SCALED < WIDTH else 1
    COLUMNS: tl.constexpr = (INPUTS + SCALED - 1) // SCALED if SCALED > 1 else 1
    SIZE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    EVEN: tl.constexpr = INPUTS == WIDTH
    FILL: tl.constexpr = None if EVEN else 0.0

    program = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
    columns = program * RESULTS + tl.arange(0, RESULTS)
    inputs = tl.arange(0, WIDTH)
    inside = None if EVEN else inputs < INPUTS
    inside_tile = None if EVEN else (inputs < INPUTS)[None, :]
    source = tl.minimum(columns, SIZE - 1)
    weight_pointers = weight + source.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    tile = tl.load(weight_pointers, inside_tile, other=FILL, eviction_policy="evict_first")
    if GATED:
        # The tile of the second half has the same layout, so each thread holds the same inputs of both tiles.
        second = tl.load(weight_pointers + SIZE * INPUTS, inside_tile, other=FILL, eviction_policy="evict_first")
    if SCALED > 1:
        # Inputs outside of the last column of blocks are 0.
        groups = tl.minimum(tl.arange(0, GROUPS), COLUMNS - 1)[None, :]
        block_scales = weight_scale + program * RESULTS // SCALED * COLUMNS + groups
        weight_scales = load_float_in_place(block_scales, OVERLAP)
        if GATED:
            second_scales = load_float_in_place(block_scales + SIZE // SCALED * COLUMNS, OVERLAP)
    else:
        weight_scales = tl.load(weight_scale + source) if SCALED == 1 else None
        second_scales = tl.load(weight_scale + SIZE + source) if SCALED == 1 and GATED else None
    if NORM:
        scale = tl.load(norm + inputs, inside, other=FILL).to(tl.float32)
    if BIAS:
        offset = tl.load(bias + source).to(tl.float32)
        if GATED:
            second_offset = tl.load(bias + SIZE + source).to(tl.float32)
    if OVERLAP:
        gdc_wait()

    values = tl.load(x + inputs, inside, other=FILL).to(tl.float32)
    out_pointers = out + columns
    if ADD:
        before = tl.load(out_pointers, columns < SIZE, other=0.0).to(tl.float32)
    if NORM:
        length = tl.rsqrt(tl.sum(values * values, axis=0) / INPUTS + eps)
        values *= scale
    total = _sum(tile, values, weight_scales, SCALED)
    if GATED:
        up = _sum(second, values, second_scales, SCALED)
    if SCALED == 1:
        total *= weight_scales
        if GATED:
            up *= second_scales
    if NORM:
        # The norm divides all inputs of a row by the same number, so it can be applied to the result.
        total *= length
        if GATED:
            up *= length
    if BIAS:
        total += offset
        if GATED:
            up += second_offset
    if GATED:
        # A separate kernel for the gate would round here too.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total = total / (1.0 + tl.exp(-total)) * up.to(out.dtype.element_ty).to(tl.float32)
    if ADD:
        total += before
    tl.store(out_pointers, total.to(out.dtype.element_ty), columns < SIZE)


@triton.jit
def norm_rows(x, weight, out, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute the RMS norm of one row in each program. Grid: ``(rows,)``."""
    offsets = tl.arange(0, WIDTH)
    inside = offsets < SIZE
    scale = tl.load(weight + offsets, inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * SIZE
    values = tl.load(x + row + offsets, inside, other=0.0).to(tl.float32)
    length = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    tl.store(out + row + offsets, (values * length * scale).to(out.dtype.element_ty), inside)
