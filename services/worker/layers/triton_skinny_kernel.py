"""The kernel of ``triton_skinny``: few rows times weights that are read once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PIECE: tl.constexpr = tl.constexpr(16384)  # bytes that one instruction asks for ahead of time


@triton.jit
def _prefetch(address, size):
    """Ask the L2 cache for ``size`` bytes at ``address``, both multiples of 16 and not 0.

    By one thread: where addresses differ between threads, they take turns.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
        " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_share(matrix, BYTES: tl.constexpr):
    """This program's share of the first ``BYTES`` of ``matrix``."""
    share = tl.cdiv(tl.cdiv(BYTES, 16), tl.num_programs(0)) * 16
    end = tl.minimum((tl.program_id(0) + 1) * share, BYTES)
    for place in range(tl.program_id(0) * share, end, _PIECE):
        _prefetch((matrix.to(tl.int64) + place), tl.minimum(end - place, _PIECE))


@triton.jit(do_not_specialize=["rows"])
def product(
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
            for line in range(BLOCK_OUT):
                if GATED:
                    row = tl.minimum(tl.program_id(0) * RESULTS + line // 2, SIZE - 1) + (line % 2) * SIZE
                else:
                    row = tl.minimum(tl.program_id(0) * RESULTS + line, SIZE - 1)
                _prefetch((weight + row.to(tl.int64) * INPUTS).to(tl.int64), OWN)
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
        _prefetch_share(ahead, AHEAD)
    if FURTHER > 0:
        _prefetch_share(further, FURTHER)

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
