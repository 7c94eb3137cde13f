"""Kernels for the products of a mixture of experts on CUDA.

Pairs of a token with one of its experts are sorted by expert, so that a program multiplies rows by the weights of one
expert. A row's result does not depend on the other rows of its program.

Many tokens and weights with scales of groups run the kernel of ``gluon_experts`` on Hopper.

The buffers have a row per pair, or blocks for any routing, so the memory of a step depends on its number of tokens
alone. The boot runs the largest step. It shows that the memory suffices, also if all tokens choose the same expert.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from services.worker.described.layer import Activation
from services.worker.layers.block_fp8 import BLOCK
from services.worker.layers.cuda_devices import fitting_stages, takes_ptx
from services.worker.layers.expert_tiles import MOST_STREAMED_PAIRS, ExpertTiles, Tile, choose_tiles, choose_wide_rows
from services.worker.layers.experts import ExpertWeights, Routes, grouped_weights, has_blocks, has_groups
from services.worker.layers.gluon_experts import gather, multiply_wide, supports_wide
from services.worker.layers.operators import operator
from services.worker.layers.triton_activations import gated
from services.worker.layers.triton_grouped_wide import add_tile
from services.worker.layers.triton_overlap import load_float_in_place
from services.worker.layers.triton_routing import Blocks, sort_pairs
from services.worker.layers.triton_rows import quantize

_STREAMED_ROWS = 16  # the smallest number of rows of a product on tensor cores
_FEWEST_ROWS_FIRST = 64  # with fewer rows, the matrix is the first factor, as tensor cores of Hopper need 64 rows
_MOST_SCALED_SUMS = 32  # the largest number of rows whose sums are scaled instead of ``GroupedWeights``
_SUMMED = 4096  # values per program of the sum


@triton.jit(do_not_specialize=["first", "pairs"])
def _products(x, x_scale, matrices, scales, biases, output, sorted_pairs, block_experts, block_count, first, pairs,
              EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SHARED_BY: tl.constexpr,
              ACTIVATION: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, STREAMED: tl.constexpr,
              MATRIX_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_OUT: tl.constexpr,
              BLOCK_IN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
              OFFSETS: tl.constexpr, FLOATS: tl.constexpr, SCALE_SUMS: tl.constexpr,
              ASM: tl.constexpr):  # fmt: skip
    """Multiply a block of pairs by ``BLOCK_OUT`` rows of its expert's matrix. Grid: ``(blocks * tiles,)``.

    ``SHARED_BY``: number of consecutive pairs that have the same row of ``x``. ``ACTIVATION``: None, or the activation
    of the gate; rows of gate and up then alternate in a tile. ``SCALED``: 0 if rows and matrices are not in fp8, 1 if
    each of their rows has a scale, else the size of square blocks of a matrix that have a scale; a row then has a scale
    for each block of columns. ``STREAMED``: each pair is a block, and ``block_experts`` are the experts of the pairs,
    counted over all ranks. ``BLOCKS``: number of blocks that follow each other in a group. ``BITS``: 0, or the bits of
    ``GroupedWeights``, which are the first factor of the product. ``GROUP``, ``TILE`` and ``OFFSETS`` are
    then theirs, and ``FLOATS`` and ``SCALE_SUMS`` are as in ``add_tile``. ``ASM``: use PTX.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    RESULTS: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    SIZE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    TILES: tl.constexpr = (SIZE + RESULTS - 1) // RESULTS
    EVEN: tl.constexpr = INPUTS % BLOCK_IN == 0

    program = tl.program_id(0)
    members = tl.arange(0, ROWS)
    if STREAMED:
        block = program // TILES
        tile = program % TILES
        expert = tl.load(block_experts + block) - first
        if (expert < 0) | (expert >= EXPERTS):
            return
        pair = block + members * 0
        used = members == 0
    else:
        count = tl.load(block_count)
        if program >= count * TILES:
            return
        before = program // (BLOCKS * TILES) * BLOCKS
        size = tl.minimum(count - before, BLOCKS)
        block = before + program % (BLOCKS * TILES) % size
        tile = program % (BLOCKS * TILES) // size
        expert = tl.load(block_experts + block)
        pair = tl.load(sorted_pairs + block * ROWS + members)
        used = pair < pairs
        pair = tl.minimum(pair, pairs - 1)  # rows without a pair compute what another row does

    lines = tl.arange(0, BLOCK_OUT)
    if GATED:
        source = tl.minimum(tile * RESULTS + lines // 2, SIZE - 1) + (lines % 2) * SIZE
    else:
        source = tl.minimum(tile * RESULTS + lines, SIZE - 1)
    offsets = tl.arange(0, BLOCK_IN)
    row = pair // SHARED_BY
    rows = x + row.to(tl.int64) * INPUTS
    lines_of_expert = expert.to(tl.int64) * OUTPUTS + source
    matrix = matrices + lines_of_expert * INPUTS
    if SCALED > 1:
        # Loaded one iteration early, because the compiler does not pipeline loads for the result of a product.
        COLUMNS: tl.constexpr = (INPUTS + SCALED - 1) // SCALED
        LINES: tl.constexpr = (OUTPUTS + SCALED - 1) // SCALED
        tl.static_assert(SCALED % BLOCK_IN == 0, "the inputs of an iteration have one scale")
        tl.static_assert(SCALED % RESULTS == 0, "the results of a tile have one scale, with the gate two")
        x_rows = pairs // SHARED_BY
        scales += (expert.to(tl.int64) * LINES + tile * RESULTS // SCALED) * COLUMNS
        row_scale = load_float_in_place(x_scale + row, ASM)
        matrix_scale = tl.load(scales)
        if GATED:
            up_scale = tl.load(scales + SIZE // SCALED * COLUMNS)
    total = tl.zeros((BLOCK_OUT, ROWS) if MATRIX_FIRST else (ROWS, BLOCK_OUT), tl.float32)
    if BITS > 0:
        WIDTH: tl.constexpr = TILE * BITS // 8
        FACTORS: tl.constexpr = INPUTS // GROUP * OUTPUTS  # scales of an expert, or its offsets
        places = tl.arange(0, WIDTH)
        codes = matrices + lines_of_expert[:, None] * (INPUTS * BITS // 8) + places[None, :]
        factors = scales + expert.to(tl.int64) * (FACTORS * 2 if OFFSETS else FACTORS) + source
        for start in range(0, INPUTS, TILE):
            group = factors + start // GROUP * OUTPUTS
            total = add_tile(
                total, codes + start * BITS // 8, rows[None, :] + (start + places)[:, None], group, group + FACTORS,
                used[None, :], OUTPUTS, BITS, GROUP, TILE, OFFSETS, FLOATS, SCALE_SUMS, ASM,
            )  # fmt: skip
    else:
        for start in range(0, INPUTS, BLOCK_IN):
            columns = start + offsets
            if MATRIX_FIRST:
                if EVEN:
                    left = tl.load(matrix[:, None] + columns[None, :])
                    right = tl.load(rows[None, :] + columns[:, None])
                else:
                    left = tl.load(matrix[:, None] + columns[None, :], (columns < INPUTS)[None, :], other=0.0)
                    right = tl.load(rows[None, :] + columns[:, None], (columns < INPUTS)[:, None], other=0.0)
            else:
                if EVEN:
                    left = tl.load(rows[:, None] + columns[None, :])
                    right = tl.load(matrix[None, :] + columns[:, None])
                else:
                    left = tl.load(rows[:, None] + columns[None, :], (columns < INPUTS)[None, :], other=0.0)
                    right = tl.load(matrix[None, :] + columns[:, None], (columns < INPUTS)[:, None], other=0.0)
            if SCALED > 1:
                following = tl.minimum((start + BLOCK_IN) // SCALED, COLUMNS - 1)
                next_row_scale = load_float_in_place(x_scale + following.to(tl.int64) * x_rows + row, ASM)
                next_matrix_scale = tl.load(scales + following)
                product = tl.dot(left, right)
                if GATED:
                    next_up_scale = tl.load(scales + SIZE // SCALED * COLUMNS + following)
                    line_scales = tl.where(lines % 2 == 0, matrix_scale, up_scale)
                    product *= line_scales[:, None] if MATRIX_FIRST else line_scales[None, :]
                    up_scale = next_up_scale
                    total += product * (row_scale[None, :] if MATRIX_FIRST else row_scale[:, None])
                else:
                    factor = row_scale * matrix_scale
                    total += product * (factor[None, :] if MATRIX_FIRST else factor[:, None])
                matrix_scale = next_matrix_scale
                row_scale = next_row_scale
            else:
                total = tl.dot(left, right, total, input_precision="ieee")

    if MATRIX_FIRST:
        total = tl.trans(total)
    if SCALED == 1:
        total = total * tl.load(x_scale + row)[:, None] * tl.load(scales + lines_of_expert)[None, :]
    if BIAS:
        total += tl.load(biases + lines_of_expert).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, (ROWS, RESULTS, 2)))
        total = gated(gate, up, ACTIVATION)
    results = tile * RESULTS + tl.arange(0, RESULTS)
    kept = used[:, None] & (results < SIZE)[None, :]
    tl.store(output + pair.to(tl.int64)[:, None] * SIZE + results[None, :], total.to(output.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["first"])
def _sum(rows, experts, weights, output, first, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SIZE: tl.constexpr,
         CHOSEN_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Write the weighted sum of a token's rows, without experts of other ranks. Grid: ``(tokens, columns)``.

    ``ADD``: add it to ``output``, rounded once.
    """
    token = tl.program_id(0).to(tl.int64)
    columns, slots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHOSEN_WIDTH)
    pairs, inside = token * CHOSEN + slots, columns < SIZE
    expert = tl.load(experts + pairs, slots < CHOSEN, other=-1) - first
    here = (slots < CHOSEN) & (expert >= 0) & (expert < EXPERTS)
    weight = tl.load(weights + pairs, here, other=0.0)
    values = tl.load(rows + pairs[:, None] * SIZE + columns[None, :], here[:, None] & inside[None, :], other=0.0)
    total = tl.sum(values.to(tl.float32) * weight[:, None], axis=0)
    if ADD:
        total += tl.load(output + token * SIZE + columns, inside, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + columns, total.to(output.dtype.element_ty), inside)


class _Grouping(NamedTuple):
    """The pairs of a step in the order in which programs multiply them."""

    pairs: int
    chosen: int
    first: int
    blocks: Blocks | None  # None: each pair is a block
    experts: torch.Tensor  # [tokens, chosen] int32
    tiles: ExpertTiles

    @property
    def most_blocks(self) -> int:
        """The number of blocks of the worst routing."""
        return self.pairs if self.blocks is None else self.blocks.experts.shape[0]


_ARGUMENTS = (
    "Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias,"
    " int first, Tensor? gate_up_scale, Tensor? down_scale, str activation"
)


@operator(f"mix_experts({_ARGUMENTS}) -> Tensor", lambda x, *_: torch.empty_like(x), "CUDA")
def mix_experts(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return what ``layers.experts.mix`` does; see ``add_experts``."""
    output = torch.empty_like(x)
    _mix(output, False, x, *arguments)
    return output


@operator(f"add_experts(Tensor(a!) onto, {_ARGUMENTS}) -> ()", lambda *_: None, "CUDA")
def add_experts(onto: torch.Tensor, x: torch.Tensor, *arguments: Any) -> None:
    """Add what ``layers.experts.mix`` returns to ``onto``, for contiguous tensors of the fields of its arguments.

    With fp8 weights, the inputs of both products are quantized, with scales of rows or of blocks of their columns.
    """
    _mix(onto, True, x, *arguments)


def _mix(
    output: torch.Tensor,
    add: bool,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    first: int,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    activation: Activation,
) -> None:
    pairs, groups = experts.numel(), has_groups(gate_up_scale)
    parts = ExpertWeights(gate_up, down, gate_up_bias, down_bias, first, gate_up_scale, down_scale)
    inputs: dict[str, Any] = {"x": x, "routes": Routes(experts, weights), "weights": parts, "activation": activation}
    rows = choose_wide_rows(pairs, len(gate_up)) if groups else None
    if rows is not None and supports_wide(parts, x):
        mix_wide(**inputs, rows=rows, output=output, add=add)
    else:
        tiles = choose_tiles(pairs, len(gate_up), gate_up.itemsize, blocks=has_blocks(gate_up_scale), groups=groups)
        mix_with_tiles(**inputs, tiles=tiles, streamed=pairs <= MOST_STREAMED_PAIRS, output=output, add=add)


def mix_wide(
    x: torch.Tensor,
    routes: Routes,
    weights: ExpertWeights,
    activation: Activation,
    *,
    rows: int,
    output: torch.Tensor,
    add: bool,
) -> None:
    """Do what ``mix_with_tiles`` does with the kernel of ``gluon_experts``, if ``supports_wide``.

    ``rows`` of a block: 64, 128 or 256.
    """
    pairs, count = routes.experts.numel(), len(weights.gate_up)
    blocks = sort_pairs(routes.experts, weights.first, count, rows)
    gate_up = weights.gate_up, weights.gate_up_scale, weights.gate_up_bias
    inner = x.new_empty(len(blocks.pairs), weights.gate_up.shape[1] // 2)
    multiply_wide(gather(x, blocks, pairs), *gate_up, blocks, pairs, inner, activation)
    products = x.new_empty(pairs, weights.down.shape[1])
    multiply_wide(inner, weights.down, weights.down_scale, weights.down_bias, blocks, pairs, products, None)
    _add_up(products, routes, weights.first, count, output, add)


def mix_with_tiles(
    x: torch.Tensor,
    routes: Routes,
    weights: ExpertWeights,
    activation: Activation,
    tiles: ExpertTiles,
    *,
    streamed: bool,
    output: torch.Tensor,
    add: bool,
) -> None:
    """Write ``mix_experts`` with the given options to ``output``, or add it to ``output``.

    ``streamed``: read the weights of each pair, without sorting.
    """
    pairs, count, chosen = routes.experts.numel(), len(weights.gate_up), routes.experts.shape[1]
    blocks = None if streamed else sort_pairs(routes.experts, weights.first, count, tiles.rows)
    if streamed:
        tiles = tiles._replace(rows=_STREAMED_ROWS)
    grouping = _Grouping(pairs, chosen, weights.first, blocks, routes.experts, tiles)
    width, hidden = weights.gate_up.shape[1] // 2, weights.down.shape[1]
    inner, rows = x.new_empty(pairs, width), x.new_empty(pairs, hidden)
    _launch(grouping, x, weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, inner, activation)
    _launch(grouping, inner, weights.down, weights.down_scale, weights.down_bias, rows, None)
    _add_up(rows, routes, weights.first, count, output, add)


def _add_up(rows: torch.Tensor, routes: Routes, first: int, count: int, output: torch.Tensor, add: bool) -> None:
    """Write the sums of the ``rows [pairs, size]`` of tokens to ``output``, or add them, for experts from ``first``."""
    (tokens, chosen), size = routes.experts.shape, rows.shape[1]
    chosen_width = triton.next_power_of_2(chosen)
    block = min(_SUMMED // chosen_width, triton.next_power_of_2(size))
    _sum[(tokens, triton.cdiv(size, block))](
        rows, routes.experts, routes.weights, output, first, EXPERTS=count, CHOSEN=chosen, SIZE=size,
        CHOSEN_WIDTH=chosen_width, BLOCK=block, ADD=add, num_warps=4,
    )  # fmt: skip


def _launch(
    grouping: _Grouping,
    x: torch.Tensor,
    matrices: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    output: torch.Tensor,
    activation: Activation | None,
) -> None:
    """Write the products of all pairs to ``output [pairs, size]``. ``x`` has a row per token, or per pair."""
    blocks, tiles = grouping.blocks or Blocks(*[grouping.experts] * 3), grouping.tiles
    tile: Tile = tiles.down if activation is None else tiles.gate_up
    shared_by = grouping.pairs // x.shape[0]
    experts, outputs, inputs = len(matrices), matrices.shape[1], x.shape[1]
    x_scale, scaled, floats = x, 0, False
    constants = {"INPUTS": inputs, "OUTPUTS": outputs, "BITS": 0, "GROUP": 0, "TILE": 0, "OFFSETS": False}
    constants["ASM"] = takes_ptx(x.device)
    if has_groups(scales):
        weights = grouped_weights(matrices[0], scales[0], inputs)
        constants, floats = weights.constants(), weights.floats
    elif scales is not None:
        block = BLOCK if has_blocks(scales) else None
        scaled = block or 1
        x, x_scale = quantize(x, block)
    results = tile.outputs if activation is None else tile.outputs // 2
    bits, width = constants["BITS"] or 8 * matrices.itemsize, constants["TILE"] or tile.inputs
    stage = width * (tile.outputs * bits // 8 + tiles.rows * x.itemsize)
    stages = fitting_stages(x.device, stage, tile.stages)
    _products[(grouping.most_blocks * triton.cdiv(output.shape[1], results),)](
        x, x_scale, matrices, x if scales is None else scales, x if biases is None else biases, output, *blocks,
        grouping.first, grouping.pairs, **constants, EXPERTS=experts, SHARED_BY=shared_by, ACTIVATION=activation,
        SCALED=scaled, BIAS=biases is not None, STREAMED=grouping.blocks is None,
        MATRIX_FIRST=bool(constants["BITS"]) or tiles.rows < _FEWEST_ROWS_FIRST, FLOATS=floats,
        SCALE_SUMS=tiles.rows <= _MOST_SCALED_SUMS, ROWS=tiles.rows, BLOCKS=tiles.group, BLOCK_OUT=tile.outputs,
        BLOCK_IN=tile.inputs, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
