"""Kernel of ``triton_experts`` for many tokens and weights of 4 or 8 bits, on tensor cores of Hopper.

The rows of the tokens of an expert are copied next to each other first, in blocks. Then programs multiply blocks of
rows by outputs as in ``gluon_grouped``. In a block of the first product, the lines are eight gates, the eight factors
of these gates, and so on, so that a thread has the sums of both.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from services.worker.described.layer import Activation
from services.worker.layers.cuda_devices import is_hopper, multiprocessors
from services.worker.layers.experts import ExpertWeights, grouped_weights, has_groups
from services.worker.layers.gluon_grouped import (
    LINES,
    PRODUCER_REGISTERS,
    WARPS,
    Sizes,
    allocate_rings,
    arrange,
    describe,
    fill,
    sum_tiles,
)
from services.worker.layers.triton_activations import gated
from services.worker.layers.triton_routing import Blocks

# Slots of the rings of rows and of codes, by the rows of a block and the inputs of a tile.
_SLOTS = {
    (64, 64): (10, 8), (64, 128): (8, 5), (128, 64): (10, 8), (128, 128): (6, 4), (256, 64): (6, 4), (256, 128): (4, 2),
}  # fmt: skip
_SLICE = gl.constexpr(8)  # lines of a block that are neighbours
_COPIED = 1024  # elements of a row that are copied at once


@gluon.jit(do_not_specialize=["pairs"])
def experts_wide(x, codes, scales, biases, results, output, sorted_pairs, block_experts, block_count, pairs,
                 C: gl.constexpr):  # fmt: skip
    """Multiply rows of tokens by outputs of their experts, in blocks. Grid: ``(programs,)``.

    ``x [blocks * rows, inputs]`` and ``results [blocks * rows, width]`` are descriptors of tensors, and ``codes
    [slices, 2, 8, codes]`` one of int16 in which a block is the lines of ``_slices``. With an activation, gated sums
    are written to ``results``. Otherwise sums are written to ``output [pairs, outputs]``, at the pair of their row. The
    other tensors are those of ``ExpertWeights`` and of ``Blocks``, and ``C`` are ``Sizes``.
    """
    rings = allocate_rings(x, codes, C)
    staged = gl.allocate_shared_memory(x.dtype, results.block_type.shape, results.layout)
    gl.warp_specialize(
        [
            (
                _consume,
                (rings, staged, scales, biases, results, output, sorted_pairs, block_experts, block_count, pairs, C),
            ),
            (_produce, (rings, x, codes, block_experts, block_count, C)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _locate(unit, count, C: gl.constexpr):
    """Return the block of rows and the first result of ``unit``. There are ``count`` blocks of rows."""
    RESULTS: gl.constexpr = C.lines if C.activation is None else C.lines // 2
    block, result_block = arrange(unit, count, (C.outputs + C.lines - 1) // C.lines)
    return block, result_block * RESULTS


@gluon.jit
def _units(count, C: gl.constexpr):
    """Return how many pairs of a block of rows and a block of outputs there are."""
    return count * ((C.outputs + C.lines - 1) // C.lines)


@gluon.jit
def _sources(first, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Return the outputs of the lines of a block whose first result is ``first``."""
    lines = gl.arange(0, C.lines, gl.SliceLayout(1, LAYOUT))
    if C.activation is None:
        outputs = gl.minimum(first + lines, C.outputs - 1)
    else:
        WIDTH: gl.constexpr = C.outputs // 2
        gates = gl.minimum(first + lines // (2 * _SLICE) * _SLICE + lines % _SLICE, WIDTH - 1)
        outputs = gates + lines // _SLICE % 2 * WIDTH
    return outputs


@gluon.jit
def _produce(rings, x, codes, block_experts, block_count, C: gl.constexpr):
    """Fill the rings, in the order in which ``_consume`` empties them."""
    TILES: gl.constexpr = C.inputs // C.tile
    SLICE: gl.constexpr = 2 * _SLICE if C.activation is None else _SLICE
    count = gl.load(block_count)
    step = 0
    for unit in range(gl.program_id(0), _units(count, C), gl.num_programs(0)):
        block, first = _locate(unit, count, C)
        expert = gl.load(block_experts + block)
        fill(rings, x, codes, block * C.rows, (expert * C.outputs + first) // SLICE, 0, TILES, step, C)
        step += TILES


@gluon.jit
def _consume(rings, staged, scales, biases, results, output, sorted_pairs, block_experts, block_count, pairs,
             C: gl.constexpr):  # fmt: skip
    """Multiply what is in the rings."""
    DTYPE: gl.constexpr = results.dtype
    TILES: gl.constexpr = C.inputs // C.tile
    FACTORS: gl.constexpr = C.inputs // C.group * C.outputs  # scales of an expert, or its offsets
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C.rows, 16])
    PAIRS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 1)
    count = gl.load(block_count)
    step = 0
    for unit in range(gl.program_id(0), _units(count, C), gl.num_programs(0)):
        block, first = _locate(unit, count, C)
        expert = gl.load(block_experts + block).to(gl.int64)
        factors = scales + expert * (FACTORS * 2 if C.offsets else FACTORS)
        total = sum_tiles(rings, factors, factors + FACTORS, _sources(first, PAIRS, C), 0, TILES, step, SUMS, C)
        step += TILES
        if C.bias:
            places = expert * C.outputs + _sources(first, SUMS, C)
            total += gl.load(biases + places).to(gl.float32)[:, None]
        if C.activation is not None:
            values = _gate(total, C).to(DTYPE)
            tma.store_wait(0)  # for the copy of the results before
            staged.permute((1, 0)).store(values)
            fence_async_shared()
            tma.async_copy_shared_to_global(results, [block * C.rows, first], staged)
        else:
            staged.permute((1, 0)).store(total.to(DTYPE))
            _scatter(staged, output, sorted_pairs + block * C.rows, pairs, first, C)
    tma.store_wait(0)


@gluon.jit
def _gate(total, C: gl.constexpr):
    """Return ``[lines / 2, rows]`` of the lines of ``_sources``, which are gates and their factors."""
    LINES: gl.constexpr = C.lines
    ROWS: gl.constexpr = C.rows
    ACTIVATION: gl.constexpr = C.activation
    slices = total.reshape([LINES // (2 * _SLICE), 2, _SLICE, ROWS])
    gates, factors = gl.split(slices.permute((0, 2, 3, 1)))
    return gated(gates, factors, ACTIVATION).reshape([LINES // 2, ROWS])


@gluon.jit
def _scatter(staged, output, sorted_pairs, pairs, first, C: gl.constexpr):
    """Write the rows of ``staged`` to the rows of their pairs in ``output``, from column ``first`` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, LAYOUT))
    columns = first + gl.arange(0, C.lines, gl.SliceLayout(0, LAYOUT))
    pair = gl.load(sorted_pairs + rows)
    inside = (pair < pairs)[:, None] & (columns < C.outputs)[None, :]
    gl.store(output + pair.to(gl.int64)[:, None] * C.outputs + columns[None, :], staged.load(LAYOUT), inside)


@triton.jit(do_not_specialize=["pairs"])
def _gather(x, output, sorted_pairs, block_count, pairs, CHOSEN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Copy the row of a pair to its place, or zeros to a row without a pair. Grid: ``(most blocks * rows,)``."""
    row = tl.program_id(0)
    if row // ROWS >= tl.load(block_count):
        return
    pair = tl.load(sorted_pairs + row)
    source, target = x + (pair // CHOSEN).to(tl.int64) * SIZE, output + row.to(tl.int64) * SIZE
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < SIZE
        tl.store(target + columns, tl.load(source + columns, inside & (pair < pairs), other=0.0), inside)


def supports_wide(weights: ExpertWeights, x: torch.Tensor) -> bool:
    """Return whether ``multiply_wide`` takes ``weights`` and their inputs ``x``.

    Offsets of 8-bit weights are too large to be rounded to bfloat16, and scales of MXFP4 are too large for float16.
    """
    width = weights.gate_up.shape[1] // 2
    return (
        is_hopper(x.device)
        and _takes(weights.gate_up, weights.gate_up_scale, x.shape[1], x.dtype)
        and _takes(weights.down, weights.down_scale, width, x.dtype)
    )


def _takes(codes: torch.Tensor, scales: torch.Tensor | None, inputs: int, dtype: torch.dtype) -> bool:
    if not has_groups(scales):
        return False
    weights = grouped_weights(codes[0], scales[0], inputs)
    fine = dtype == torch.bfloat16 if weights.floats else weights.bits == 4 or weights.offsets is None
    fine &= dtype.itemsize == 2
    return fine and weights.wide_tile in {64, 128} and weights.shape[0] % 16 == 0


def multiply_wide(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    blocks: Blocks,
    pairs: int,
    output: torch.Tensor,
    activation: Activation | None,
) -> None:
    """Write the products of all blocks of rows to ``output``.

    ``codes`` and ``scales`` are those of ``ExpertWeights``, and ``x [rows of blocks, inputs]`` are the rows of
    ``blocks``. With an activation, ``output`` is ``[rows of blocks, width]``, and otherwise ``[pairs, outputs]``.
    """
    if not has_groups(scales):
        raise TypeError("the weights have no scales of groups; use mix_with_tiles")
    outputs, inputs = codes.shape[1], x.shape[1]
    weights = grouped_weights(codes[0], scales[0], inputs)
    tile = weights.wide_tile
    sizes = Sizes(
        inputs, outputs, weights.bits, weights.group, tile, weights.offsets is not None, biases is not None,
        blocks.rows, LINES, *_SLOTS[blocks.rows, tile], weights.floats, activation,
    )  # fmt: skip
    results = LINES if activation is None else LINES // 2
    experts_wide[(multiprocessors(x.device),)](
        describe(x, (blocks.rows, tile // 2)), _slices(codes, tile * weights.bits // 16, activation),
        scales, x if biases is None else biases, describe(output, (blocks.rows, results)), output, *blocks, pairs,
        C=sizes, num_warps=WARPS,
    )  # fmt: skip


def gather(x: torch.Tensor, blocks: Blocks, pairs: int) -> torch.Tensor:
    """Return the row of ``x [tokens, inputs]`` of each pair in ``blocks``, and zeros for rows without a pair."""
    rows = x.new_empty((len(blocks.pairs), x.shape[1]))
    _gather[(len(rows),)](
        x, rows, blocks.pairs, blocks.used, pairs, CHOSEN=pairs // len(x), SIZE=x.shape[1], ROWS=blocks.rows,
        BLOCK=_COPIED, num_warps=4,
    )  # fmt: skip
    return rows


def _slices(codes: torch.Tensor, width: int, activation: Activation | None) -> TensorDescriptor:
    """Return a descriptor of ``codes`` as slices of lines, ``[slices, 2, 8, codes]``, for copies of ``LINES`` lines.

    A slice is sixteen outputs, or with an activation eight gates and their factors.
    """
    lines = codes.view(torch.int16).flatten(0, 1)
    count, columns = lines.shape
    first, second = (16, 8) if activation is None else (8, codes.shape[1] // 2)
    slices = (count - second - 8) // first + 1
    shape, strides = [slices, 2, 8, columns], [first * columns, second * columns, columns, 1]
    layout = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=4)
    return TensorDescriptor(lines, shape, strides, [LINES // 16, 2, 8, width], layout)
