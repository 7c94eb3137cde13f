"""Kernel of ``triton_grouped`` for many rows, on tensor cores of Hopper.

It is written in Gluon, the language below Triton, in which a program says where values are and which warps wait for
which copies. A producer warp copies rows and codes of tiles of inputs into rings in shared memory. Eight warps convert
codes to floats in registers, which are the first factor of a product of tensor cores, while these compute the product
before. Each program multiplies several blocks, of rows by outputs, one after the other. The first copies for a block
run at the end of the block before, and so does the copy of its results to memory.

If the last blocks are enough for at most half of the programs, several programs share the inputs of a block. The one
with the last part of them adds the sums of the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from services.worker.layers.gluon_unpack import doubled, weights_of_pairs

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7

LINES = 128  # outputs of a block
WARPS = 8  # that compute
_TOGETHER = gl.constexpr(8)  # blocks of rows that follow each other
PRODUCER_REGISTERS = gl.constexpr(24)
_MORE_TILES = gl.constexpr(2)  # of the last part of a block, since sums of the other parts have to be written first


class Sizes(NamedTuple):
    """The constants of ``grouped_wide``."""

    inputs: int
    outputs: int
    bits: int
    group: int
    tile: int  # inputs that are multiplied together, at least 64
    offsets: bool
    bias: bool
    rows: int  # of a block, a power of two, at most 256
    lines: int  # outputs of a block
    slots: int  # of the ring of rows; a slot has half a tile of inputs
    code_slots: int  # of the ring of codes
    floats: bool = False  # weights are in MXFP4
    activation: str | None = None  # of experts whose outputs are gates, and then the factors of the gates


def describe(tensor: torch.Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Return a descriptor of ``tensor``, of elements of 8 or 16 bits, for copies of ``block`` to or from memory."""
    size = tensor.element_size()
    width = min(128, size * block[-1])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=len(block))
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


@gluon.jit(do_not_specialize=["rows", "shared", "parts"])
def grouped_wide(x, codes, scales, offsets, bias, results, sums, flags, rows, shared, parts, C: gl.constexpr):
    """Multiply rows by outputs, in blocks. Grid: ``(programs,)``, at most one for each multiprocessor.

    ``x [rows, inputs]``, ``codes [outputs, pairs]`` int16 and ``results [rows, outputs]`` are descriptors of tensors.
    Each of the last ``shared`` blocks has ``parts`` programs. Each but the last writes ``sums [shared * parts, lines,
    rows of a block]`` float32 and sets its element of ``flags`` int32 from 0 to 1. The last one waits for that, adds
    the sums, and sets the flags to 0. The other tensors are those of ``GroupedLinear``, and ``C`` are ``Sizes``.
    """
    rings = allocate_rings(x, codes, C)
    staged = gl.allocate_shared_memory(x.dtype, [C.rows, C.lines], results.layout)
    gl.warp_specialize(
        [
            (_consume, (rings, staged, scales, offsets, bias, results, sums, flags, rows, shared, parts, C)),
            (_produce, (rings, x, codes, rows, shared, parts, C)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def allocate_rings(x, codes, C: gl.constexpr):
    """Return the rings of rows and of codes, with barriers for their filled and for their free slots."""
    SLOTS: gl.constexpr = C.slots
    CODE_SLOTS: gl.constexpr = C.code_slots
    row_ring = gl.allocate_shared_memory(x.dtype, [SLOTS, C.rows, C.tile // 2], x.layout)
    code_ring = gl.allocate_shared_memory(gl.int16, [CODE_SLOTS] + codes.block_type.shape, codes.layout)  # noqa: RUF005
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    codes_filled = gl.allocate_shared_memory(gl.int64, [CODE_SLOTS, 1], mbarrier.MBarrierLayout())
    codes_free = gl.allocate_shared_memory(gl.int64, [CODE_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(filled.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    for slot in gl.static_range(CODE_SLOTS):
        mbarrier.init(codes_filled.index(slot), count=1)
        mbarrier.init(codes_free.index(slot), count=1)
    return row_ring, code_ring, filled, free, codes_filled, codes_free


@gluon.jit
def _locate(block, rows, C: gl.constexpr):
    """Return the first row and the first output of ``block``."""
    row_block, line_block = arrange(block, (rows + C.rows - 1) // C.rows, (C.outputs + C.lines - 1) // C.lines)
    return row_block * C.rows, line_block * C.lines


@gluon.jit
def arrange(block, row_blocks, LINE_BLOCKS: gl.constexpr):
    """Return which of ``row_blocks`` and of ``LINE_BLOCKS`` meet in ``block`` of the product.

    Some blocks of rows follow each other, so that their weights stay in the L2 cache.
    """
    before = block // (_TOGETHER * LINE_BLOCKS) * _TOGETHER
    size = gl.minimum(row_blocks - before, _TOGETHER)
    inside = block % (_TOGETHER * LINE_BLOCKS)
    return before + inside % size, inside // size


@gluon.jit
def _count(rows, shared, parts, C: gl.constexpr):
    """Return the number of blocks that are not shared, and the number of units: of these blocks and of parts."""
    whole = (rows + C.rows - 1) // C.rows * ((C.outputs + C.lines - 1) // C.lines) - shared
    return whole, whole + shared * parts


@gluon.jit
def _locate_part(unit, whole, parts, C: gl.constexpr):
    """Return the block of ``unit``, and the first of its tiles and the one after its last one."""
    TILES: gl.constexpr = C.inputs // C.tile
    block, first, stop = unit, 0, TILES
    if unit >= whole:
        part = (unit - whole) % parts
        block = whole + (unit - whole) // parts
        first = part * (TILES - _MORE_TILES) // parts
        stop = (part + 1) * (TILES - _MORE_TILES) // parts
        if part == parts - 1:
            stop = TILES
    gl.assume(stop > first)
    return block, first, stop


@gluon.jit
def _produce(rings, x, codes, rows, shared, parts, C: gl.constexpr):
    """Fill the rings, in the order in which ``_consume`` empties them."""
    whole, units = _count(rows, shared, parts, C)
    step = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block, first, stop = _locate_part(unit, whole, parts, C)
        row, line = _locate(block, rows, C)
        fill(rings, x, codes, row, line, first, stop, step, C)
        step += stop - first


@gluon.jit
def fill(rings, x, codes, row, line, first, stop, step, C: gl.constexpr):
    """Fill the rings with the tiles from ``first`` to ``stop - 1`` of the rows from ``row`` on.

    ``line`` is where the block's codes begin in the first dimension of ``codes``, and ``step`` the number of tiles that
    were copied before.
    """
    row_ring, code_ring, filled, free, codes_filled, codes_free = rings
    HALF: gl.constexpr = C.tile // 2
    WIDTH: gl.constexpr = C.tile * C.bits // 16
    for tile in range(first, stop):
        slot = step % C.code_slots
        mbarrier.wait(codes_free.index(slot), (step // C.code_slots & 1) ^ 1)
        mbarrier.expect(codes_filled.index(slot), codes.block_type.nbytes)
        source = [line, tile * WIDTH] if len(codes.block_type.shape) == 2 else [line, 0, 0, tile * WIDTH]
        tma.async_copy_global_to_shared(codes, source, codes_filled.index(slot), code_ring.index(slot))
        for half in gl.static_range(2):
            number = 2 * step + half
            slot = number % C.slots
            mbarrier.wait(free.index(slot), (number // C.slots & 1) ^ 1)
            mbarrier.expect(filled.index(slot), x.block_type.nbytes)
            tma.async_copy_global_to_shared(
                x, [row, (2 * tile + half) * HALF], filled.index(slot), row_ring.index(slot)
            )
        step += 1


@gluon.jit
def _load_factor(factors, DTYPE: gl.constexpr, FLOATS: gl.constexpr):
    """Return scales or offsets as ``doubled`` returns them. With ``FLOATS``, they are exponents of bfloat16."""
    if FLOATS:
        exponents = gl.load(factors).to(gl.uint32) << 7
        factor = exponents | (exponents << 16)
    else:
        factor = doubled(gl.load(factors), DTYPE)
    return factor


@gluon.jit
def _load_factors(scales, offsets, tile, source, DTYPE: gl.constexpr, C: gl.constexpr):
    """Return scales and offsets of the halves of ``tile`` for the outputs ``source``, as ``doubled`` returns them."""
    place = tile * C.tile // C.group * C.outputs + source
    scale = _load_factor(scales + place, DTYPE, C.floats)
    offset = _load_factor(offsets + place, DTYPE, C.floats) if C.offsets else scale
    second_scale, second_offset = scale, offset
    if C.group < C.tile:  # the halves of a tile are two groups
        second_scale = _load_factor(scales + place + C.outputs, DTYPE, C.floats)
        second_offset = _load_factor(offsets + place + C.outputs, DTYPE, C.floats) if C.offsets else second_scale
    return scale, offset, second_scale, second_offset


@gluon.jit
def _multiply(total, weights, rings, number, C: gl.constexpr):
    """Start to add the product of ``weights`` and the rows of half a tile, which is copy ``number`` to the ring."""
    row_ring, _, filled, _, _, _ = rings
    slot = number % C.slots
    mbarrier.wait(filled.index(slot), number // C.slots & 1)
    return warpgroup_mma(weights, row_ring.index(slot).permute((1, 0)), total, is_async=True)


@gluon.jit
def sum_tiles(rings, scales, offsets, source, first, stop, step, SUMS: gl.constexpr, C: gl.constexpr):
    """Return the product ``[lines, rows]`` of the tiles from ``first`` to ``stop - 1``, as ``fill`` copies them.

    ``source`` are the outputs of the lines. There are two sets of registers for weights. While a product reads one of
    them, the next weights are written to the other one.
    """
    row_ring, code_ring, _, free, codes_filled, codes_free = rings
    DTYPE: gl.constexpr = row_ring.dtype
    HALF: gl.constexpr = C.tile // 2
    LINES: gl.constexpr = C.lines
    ROWS: gl.constexpr = C.rows
    WIDTH: gl.constexpr = C.tile * C.bits // 16
    TILES: gl.constexpr = C.inputs // C.tile
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    PAIRS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 1)
    total = warpgroup_mma_init(gl.zeros([LINES, ROWS], gl.float32, SUMS))
    high = gl.zeros([LINES, HALF], DTYPE, WEIGHTS)
    scale, offset, second_scale, second_offset = _load_factors(scales, offsets, first, source, DTYPE, C)
    for tile in range(first, stop):
        slot = step % C.code_slots
        number = 2 * step
        mbarrier.wait(codes_filled.index(slot), step // C.code_slots & 1)
        tile_codes = code_ring.index(slot).reshape([LINES, WIDTH])
        pairs = tile_codes.load(PAIRS) if C.bits == 4 else tile_codes.slice(0, HALF // 2, dim=1).load(PAIRS)
        low = weights_of_pairs(pairs, scale, offset, False, C.bits, C.offsets, C.floats, DTYPE, WEIGHTS)
        total = _multiply(total, low, rings, number, C)
        following = gl.minimum(tile + 1, TILES - 1)
        next_factors = _load_factors(scales, offsets, following, source, DTYPE, C)
        high = warpgroup_mma_wait(1, deps=[high])
        mbarrier.arrive(free.index((number + C.slots - 1) % C.slots), count=1, pred=tile > first)
        if C.bits == 8:
            pairs = tile_codes.slice(HALF // 2, HALF // 2, dim=1).load(PAIRS)
        high = weights_of_pairs(pairs, second_scale, second_offset, True, C.bits, C.offsets, C.floats, DTYPE, WEIGHTS)
        total = _multiply(total, high, rings, number + 1, C)
        # Only here it is certain that the codes have arrived in registers, since the product reads them.
        mbarrier.arrive(codes_free.index(slot), count=1)
        low = warpgroup_mma_wait(1, deps=[low])
        mbarrier.arrive(free.index(number % C.slots), count=1)
        scale, offset, second_scale, second_offset = next_factors
        step += 1
    total, high = warpgroup_mma_wait(0, deps=[total, high])
    mbarrier.arrive(free.index((2 * step + C.slots - 1) % C.slots), count=1)
    return total


@gluon.jit
def _consume(rings, staged, scales, offsets, bias, results, sums, flags, rows, shared, parts, C: gl.constexpr):
    """Multiply what is in the rings."""
    DTYPE: gl.constexpr = results.dtype
    LINES: gl.constexpr = C.lines
    TILES: gl.constexpr = C.inputs // C.tile
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C.rows, 16])
    PAIRS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 1)
    whole, units = _count(rows, shared, parts, C)
    step = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block, first, stop = _locate_part(unit, whole, parts, C)
        row, line = _locate(block, rows, C)
        source = gl.minimum(line + gl.arange(0, LINES, gl.SliceLayout(1, PAIRS)), C.outputs - 1)
        total = sum_tiles(rings, scales, offsets, source, first, stop, step, SUMS, C)
        step += stop - first
        if stop < TILES:
            _hand_over(total, sums, flags, unit - whole, SUMS)
        else:
            if unit >= whole:
                total = _add_parts(total, sums, flags, unit - whole, parts, SUMS)
            if C.bias:
                columns = line + gl.arange(0, LINES, gl.SliceLayout(1, SUMS))
                total += gl.load(bias + gl.minimum(columns, C.outputs - 1)).to(gl.float32)[:, None]
            tma.store_wait(0)  # for the copy of the results before
            staged.permute((1, 0)).store(total.to(DTYPE))
            fence_async_shared()
            tma.async_copy_shared_to_global(results, [row, line], staged)
    tma.store_wait(0)


@gluon.jit
def _places(LINES: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Return where the elements of sums are stored. Squares of 8 by 8, which a warp has at once, are contiguous."""
    line = gl.arange(0, LINES, gl.SliceLayout(1, SUMS))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    return (row // 8 * (LINES // 8) + line // 8) * 64 + line % 8 * 8 + row % 8


@gluon.jit
def _hand_over(total, sums, flags, slot, SUMS: gl.constexpr):
    """Write ``total`` to ``sums[slot]``, for the program that adds it."""
    LINES: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    gl.store(sums + slot * (LINES * ROWS) + _places(LINES, ROWS, SUMS), total)
    _barrier()
    gl.atomic_xchg(flags + slot, 1, sem="release")


@gluon.jit
def _add_parts(total, sums, flags, slot, parts, SUMS: gl.constexpr):
    """Return ``total`` and the sums of the parts before ``slot``, if it is the last part of a block."""
    LINES: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    for other in range(slot - parts + 1, slot):
        while gl.atomic_cas(flags + other, 1, 0, sem="acquire") == 0:
            pass
        total += gl.load(sums + other * (LINES * ROWS) + _places(LINES, ROWS, SUMS))
    return total
