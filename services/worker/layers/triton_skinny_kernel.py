"""Kernel of ``triton_skinny`` that multiplies a few rows by weights, which are read once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.worker.layers.triton_few_rows import gate_pairs, load_squares, store_prepared, weight_rows
from services.worker.layers.triton_overlap import load_early, load_float_in_place
from services.worker.layers.triton_unpack import byte_floats


@triton.jit(do_not_specialize=["rows"])
def product(
    x,
    weight,
    weight_scale,
    bias,
    norm,
    squares_before,
    out,
    next_values,
    next_norm,
    next_squares,
    rows,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FULL: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    PREPARED: tl.constexpr,
    PREPARES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply all rows by ``BLOCK_OUT`` weight rows in each program. Grid: ``(blocks of outputs,)``.

    ``GATED``: rows of gate and up alternate in a tile. ``FULL``: there are exactly ``ROWS`` rows. ``SCALED``: 0 if
    ``weight`` is not in fp8, 1 if each of its rows has a scale, else the size of square blocks that have a scale;
    ``weight_scale`` then is ``[row blocks, column blocks]``. ``PREPARED``: number of parts in ``squares_before``, or 0
    if ``x`` is not prepared for its norm. ``PREPARES``: prepare ``out`` for the next norm. ``STAGES``: pipeline stages.
    ``OVERLAP``: start before the previous kernel has ended. The next kernel may start only after the previous one has
    ended, because waiting programs of a third kernel cost more than they save. ``ASM``: use PTX.
    """
    RESULTS: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    SIZE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    PART: tl.constexpr = BLOCK_IN // PARTS
    EVEN: tl.constexpr = INPUTS % BLOCK_IN == 0

    program = tl.program_id(0)
    source = weight_rows(program, BLOCK_OUT, RESULTS, SIZE, GATED)
    members = tl.arange(0, ROWS)
    columns = program * RESULTS + tl.arange(0, RESULTS)
    out_offsets = members[None, :] * SIZE + columns[:, None]
    kept = (members < rows)[None, :] & (columns < SIZE)[:, None]
    # Load the epilogue's inputs early to hide their latency.
    if PREPARES:
        next_scale = load_early(next_norm + columns, columns < SIZE, OVERLAP)
    if SCALED == 1:
        weight_scales = tl.load(weight_scale + source)
    if BIAS:
        offset = load_early(bias + source, source >= 0, OVERLAP)
    # Each warp multiplies a part of the inputs. Otherwise all warps would read the same weights from shared memory.
    offsets = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    weight_pointers = weight + source.to(tl.int64)[None, :, None] * INPUTS + offsets[:, None, :]
    x_pointers = x + members[None, None, :] * INPUTS + offsets[:, :, None]
    inside_rows = (members < rows)[None, None, :]
    if SCALED > 1:
        COLUMNS: tl.constexpr = (INPUTS + SCALED - 1) // SCALED
        tl.static_assert(SCALED % PART == 0, "a part of the inputs has one scale")
        tl.static_assert(SCALED % BLOCK_OUT == 0, "the rows of a program are in one block of the weight")
        # With ``GATED``, there are two of them. The other rows of a tile have the same scale.
        scale_rows = source[None, :] if GATED else program * RESULTS
        scale_pointers = weight_scale + scale_rows // SCALED * COLUMNS
        part_inputs = (tl.arange(0, PARTS) * PART)[:, None]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if ADD:
        before = load_early(out + out_offsets, kept, OVERLAP)
    if PREPARED > 0:
        known_squares = load_squares(squares_before, members, rows, PREPARED)

    parts = tl.zeros((PARTS, BLOCK_OUT, ROWS), tl.float32)
    if SCALED > 1:  # the product of the iteration before, and its scales
        last_product, block_scales = parts, load_float_in_place(scale_pointers + tl.zeros_like(part_inputs), OVERLAP)
    squares = tl.zeros((PARTS, PART, ROWS), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
        inside = start + offsets < INPUTS
        if EVEN:
            tile = tl.load(weight_pointers + start)
            values = tl.load(x_pointers + start, None if FULL else inside_rows, other=None if FULL else 0.0)
        else:
            tile = tl.load(weight_pointers + start, inside[:, None, :], other=0.0)
            values = tl.load(x_pointers + start, inside_rows & inside[:, :, None], other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + start + offsets, inside, other=0.0).to(tl.float32)
            values = (wide * scale[:, :, None]).to(values.dtype)
        if SCALED > 0:
            tile = byte_floats(tile, values.dtype, ASM)
        if SCALED > 1:
            # A product is scaled in the next iteration, so that the program does not wait for its end here.
            parts += last_product * block_scales[:, :, None]
            last_product = tl.dot(tile, values)
            columns_of_parts = tl.minimum((start + part_inputs) // SCALED, COLUMNS - 1)
            block_scales = load_float_in_place(scale_pointers + columns_of_parts, OVERLAP)
        else:
            parts = tl.dot(tile, values, parts)
    if SCALED > 1:
        parts += last_product * block_scales[:, :, None]
    total = tl.sum(parts, axis=0)
    if SCALED == 1:
        total *= weight_scales[:, None]

    if NORM or PREPARED > 0:
        # The norm divides all inputs of a row by the same number, so it can be applied to the result.
        square = tl.sum(known_squares, axis=0) if PREPARED > 0 else tl.sum(tl.sum(squares, axis=0), axis=0)
        total = total * tl.rsqrt(square / INPUTS + eps)[None, :]
    if BIAS:
        total += offset[:, None]
    if GATED:
        total = gate_pairs(total, out.dtype.element_ty, RESULTS, ROWS)
    if ADD:
        total += before
    result = total.to(out.dtype.element_ty)
    tl.store(out + out_offsets, result, kept)
    if PREPARES:
        store_prepared(result, out_offsets, kept, next_scale, next_values, next_squares, program, members, rows)
