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
):
    """Multiply all rows with ``BLOCK_OUT`` weight rows in each program.

    ``GATED``: rows of gate and up alternate in a tile. ``FULL``: there are exactly ``ROWS`` rows. ``SCALED``:
    ``weight`` is in fp8, with a scale for each of its rows. ``PREPARED``: number of parts in ``squares_before``, or 0
    if ``x`` is not prepared for its norm. ``PREPARES``: prepare ``out`` for the next norm. ``STAGES``: tiles in flight,
    less one. ``OVERLAP``: start before the previous kernel has ended. The next kernel may start only after that, since
    waiting programs of a third kernel cost more than they save.
    """
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
    # The epilogue's inputs are loaded early, so that it does not wait for them.
    if PREPARES:
        next_scale = _early(next_norm + columns, columns < SIZE, OVERLAP)
    if SCALED:
        weight_scales = tl.load(weight_scale + source)
    if BIAS:
        offset = _early(bias + source, source >= 0, OVERLAP)
    # Each warp multiplies a part of the inputs. Otherwise all warps would read the same weights from shared memory.
    places = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    weight_places = weight + source.to(tl.int64)[None, :, None] * INPUTS + places[:, None, :]
    x_places = x + members[None, None, :] * INPUTS + places[:, :, None]
    inside_rows = (members < rows)[None, None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if ADD:
        before = _early(out + places_out, kept, OVERLAP)
    if PREPARED > 0:
        PADDED: tl.constexpr = triton.next_power_of_2(PREPARED)
        indices = tl.arange(0, PADDED)
        inside_squares = (indices < PREPARED)[:, None] & (members < rows)[None, :]
        known_squares = tl.load(squares_before + indices[:, None] * rows + members[None, :], inside_squares, other=0.0)

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

    if NORM or PREPARED > 0:
        # The norm divides all inputs of a row by the same number.
        square = tl.sum(known_squares, axis=0) if PREPARED > 0 else tl.sum(tl.sum(squares, axis=0), axis=0)
        total = total * tl.rsqrt(square / INPUTS + eps)[None, :]
    if BIAS:
        total += offset[:, None]
    if GATED:
        # Round as a separate kernel for the gate would.
        pairs = tl.permute(tl.reshape(total.to(out.dtype.element_ty), (RESULTS, 2, ROWS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        gate = gate.to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    if ADD:
        total += before
    result = total.to(out.dtype.element_ty)
    tl.store(out + places_out, result, kept)
    if PREPARES:
        wide_result = tl.where(kept, result.to(tl.float32), 0.0)
        tl.store(next_values + places_out, (wide_result * next_scale[:, None]).to(result.dtype), kept)
        mine = next_squares + program * rows + members
        tl.store(mine, tl.sum(wide_result * wide_result, axis=0), members < rows)
