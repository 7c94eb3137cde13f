"""Kernel of ``triton_grouped`` for a few rows, whose time is the time to read the weights from memory."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.worker.layers.triton_few_rows import gate_pairs, load_squares, store_prepared, weight_rows
from services.worker.layers.triton_overlap import load_early
from services.worker.layers.triton_unpack import high_halves, low_halves, ones_like, whole_bytes


@triton.jit(do_not_specialize=["rows"])
def grouped_rows(
    x,
    codes,
    scales,
    offsets,
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
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OFFSETS: tl.constexpr,
    NORM: tl.constexpr,
    PREPARED: tl.constexpr,
    PREPARES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply all rows by ``BLOCK_OUT`` weight rows in each program. Grid: ``(blocks of outputs,)``.

    ``codes``, ``scales`` and ``offsets`` are those of ``GroupedLinear``. ``TILES``: tiles of ``TILE`` inputs that the
    warps multiply at the same time. ``OFFSETS``: groups have offsets. ``ASM``: use PTX. The other parameters are those
    of ``product`` in ``triton_skinny_kernel``.
    """
    RESULTS: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    SIZE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    DTYPE: tl.constexpr = x.dtype.element_ty
    LINE: tl.constexpr = INPUTS * BITS // 8  # bytes of a weight row
    WIDTH: tl.constexpr = TILE * BITS // 8  # bytes of a tile in it
    EVEN: tl.constexpr = INPUTS % (TILE * TILES) == 0
    PAIRED: tl.constexpr = GROUP < TILE  # the halves of a tile are two groups
    FILL: tl.constexpr = None if EVEN else 0.0

    program = tl.program_id(0)
    source = weight_rows(program, BLOCK_OUT, RESULTS, SIZE, GATED)
    members = tl.arange(0, ROWS)
    columns = program * RESULTS + tl.arange(0, RESULTS)
    out_offsets = members[None, :] * SIZE + columns[:, None]
    kept = (members < rows)[None, :] & (columns < SIZE)[:, None]
    # Load the epilogue's inputs early to hide their latency.
    if PREPARES:
        next_scale = load_early(next_norm + columns, columns < SIZE, OVERLAP)
    if BIAS:
        bias_values = load_early(bias + source, source >= 0, OVERLAP)
    tiles, places = tl.arange(0, TILES), tl.arange(0, WIDTH)
    bytes_of_tiles = tl.arange(0, TILES * WIDTH)
    code_pointers = codes + source.to(tl.int64)[:, None] * LINE + bytes_of_tiles[None, :]
    input_offsets = tiles[:, None] * TILE + places[None, :]
    x_pointers = x + members[None, None, :] * INPUTS + input_offsets[:, :, None]
    inside_rows = (members < rows)[None, None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if ADD:
        before = load_early(out + out_offsets, kept, OVERLAP)
    if PREPARED > 0:
        known_squares = load_squares(squares_before, members, rows, PREPARED)

    parts = tl.zeros((TILES, BLOCK_OUT, ROWS), tl.float32)
    squares = tl.zeros((TILES, WIDTH, ROWS), tl.float32)
    for start in tl.range(0, INPUTS, TILE * TILES, num_stages=STAGES):
        first, line_start = start + tiles * TILE, start * BITS // 8
        group = (first // GROUP)[:, None] * OUTPUTS + source[None, :]
        if EVEN:
            inside, inside_x = None, inside_rows
            block = tl.load(code_pointers + line_start)
        else:
            inside = (first < INPUTS)[:, None]
            inside_x = inside_rows & inside[:, :, None]
            block = tl.load(code_pointers + line_start, (line_start + bytes_of_tiles < LINE)[None, :], other=0)
        # A matrix is swizzled by its rows in shared memory, so the tensor cores' reads of eight rows have no conflicts
        # of banks. Codes that are loaded in tiles would be swizzled by the tiles.
        packed = tl.permute(tl.reshape(block, (BLOCK_OUT, TILES, WIDTH)), (1, 0, 2))
        scale = tl.load(scales + group, inside, other=FILL)
        values = tl.load(x_pointers + start, inside_x, other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            squares += wide * wide
            factor = tl.load(norm + start + input_offsets, inside, other=FILL).to(tl.float32)
            values = (wide * factor[:, :, None]).to(DTYPE)
        if OFFSETS:
            # The tensor cores also compute the sums of the inputs, in the layout of the products.
            ones = ones_like(packed, DTYPE, ASM)
            sums = tl.dot(ones, values)
            offset = tl.load(offsets + group, inside, other=FILL)
        if BITS == 8:
            part = tl.dot(whole_bytes(packed, DTYPE, ASM), values)
        else:
            part = tl.dot(low_halves(packed, DTYPE, ASM), values)
            seconds = tl.load(x_pointers + start + WIDTH, inside_x, other=0.0)
            if NORM:
                wide = seconds.to(tl.float32)
                squares += wide * wide
                factor = tl.load(norm + start + WIDTH + input_offsets, inside, other=FILL).to(tl.float32)
                seconds = (wide * factor[:, :, None]).to(DTYPE)
            high = high_halves(packed, DTYPE, ASM)
            if PAIRED:
                parts += part * scale[:, :, None]
                scale = tl.load(scales + group + OUTPUTS, inside, other=FILL)
                part = tl.dot(high, seconds)
            else:
                part = tl.dot(high, seconds, part)
            if OFFSETS:
                if PAIRED:
                    parts += sums * offset[:, :, None]
                    offset = tl.load(offsets + group + OUTPUTS, inside, other=FILL)
                    sums = tl.dot(ones, seconds)
                else:
                    sums = tl.dot(ones, seconds, sums)
        parts += part * scale[:, :, None]
        if OFFSETS:
            parts += sums * offset[:, :, None]
    total = tl.sum(parts, axis=0)

    if NORM or PREPARED > 0:
        # The norm divides all inputs of a row by the same number, so it can be applied to the result.
        square = tl.sum(known_squares, axis=0) if PREPARED > 0 else tl.sum(tl.sum(squares, axis=0), axis=0)
        total = total * tl.rsqrt(square / INPUTS + eps)[None, :]
    if BIAS:
        total += bias_values[:, None]
    if GATED:
        total = gate_pairs(total, out.dtype.element_ty, RESULTS, ROWS)
    if ADD:
        total += before
    result = total.to(out.dtype.element_ty)
    tl.store(out + out_offsets, result, kept)
    if PREPARES:
        store_prepared(result, out_offsets, kept, next_scale, next_values, next_squares, program, members, rows)
