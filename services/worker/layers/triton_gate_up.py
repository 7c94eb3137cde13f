"""A matrix product for Hopper in Triton that gates as it writes, so that gate and up never reach memory.

Needs Triton: only what runs on CUDA may import this.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tiles:
    """One program computes ``rows x 2 columns`` values of the product at a time, ``inputs`` summands a turn.

    In shared memory of sm_90 (227 KiB) these take 224 KiB and 177 registers a thread: one program a multiprocessor.
    ``columns=64, warps=4, stages=3`` takes 112 KiB: two of them, one of which multiplies while the other writes.
    """

    rows: int = 128
    columns: int = 128
    inputs: int = 64
    group: int = 8  # tiles of rows that share a tile of the weight in the cache, one after the other
    warps: int = 8
    stages: int = 4
    flatten: bool = False  # True serialises the products: accumulators are set to zero within the loop


@triton.jit
def product_kernel(
    x_tiles,
    weight_tiles,
    output_tiles,
    rows,
    columns,
    inputs,
    second,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Every program takes each ``PROGRAMS``-th tile of the output.

    A tile is two blocks of ``COLUMNS`` rows of the weight, ``second`` rows apart: a gate and its up, which give one
    block of the output, or (not ``GATED``) neighbours, which give two. ``columns`` are those of the output.
    """
    width: tl.constexpr = COLUMNS if GATED else 2 * COLUMNS
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, width)
    turns = tl.cdiv(inputs, INPUTS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        # Down a group of rows before going to the next columns.
        group_tiles = GROUP * column_tiles
        first_tile = (tile // group_tiles) * GROUP
        group = tl.minimum(row_tiles - first_tile, GROUP)
        row = (first_tile + (tile % group_tiles) % group) * ROWS
        column = ((tile % group_tiles) // group) * width
        low = tl.zeros((ROWS, COLUMNS), tl.float32)
        high = tl.zeros((ROWS, COLUMNS), tl.float32)
        for turn in range(turns):
            start = turn * INPUTS
            x = x_tiles.load([row, start])
            low = tl.dot(x, weight_tiles.load([column, start]).T, low)
            high = tl.dot(x, weight_tiles.load([column + second, start]).T, high)
        if GATED:
            gated = low / (1 + tl.exp(-low)) * high
            output_tiles.store([row, column], gated.to(output_tiles.dtype))
        else:
            output_tiles.store([row, column], low.to(output_tiles.dtype))
            output_tiles.store([row, column + COLUMNS], high.to(output_tiles.dtype))


def _launch(
    x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, second: int, gated: bool, tiles: Tiles, programs: int
) -> torch.Tensor:
    inputs = x.shape[1]
    product_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.inputs]),
        TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.inputs]),
        TensorDescriptor.from_tensor(output, [tiles.rows, tiles.columns]),
        *(x.shape[0], output.shape[1], inputs, second),
        GATED=gated,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        INPUTS=tiles.inputs,
        GROUP=tiles.group,
        PROGRAMS=programs,
        FLATTEN=tiles.flatten,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output


def gate_up(x: torch.Tensor, weight: torch.Tensor, *, tiles: Tiles = Tiles(), programs: int = 132) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, ``[rows, size]``, for ``x [rows, inputs]`` and ``weight [2 * size, inputs]``
    with ``gate`` above ``up``, as ``Linear(transposed=True)`` keeps them. bfloat16; ``size`` is a multiple of
    ``tiles.columns`` and ``inputs`` of 8. ``programs``: the device's multiprocessors."""
    size = weight.shape[0] // 2
    if size % tiles.columns:
        raise ValueError(f"{size} columns are not a multiple of the tile's {tiles.columns}: a gate would meet no up")
    return _launch(x, weight, x.new_empty(x.shape[0], size), size, True, tiles, programs)


def product(x: torch.Tensor, weight: torch.Tensor, *, tiles: Tiles = Tiles(), programs: int = 132) -> torch.Tensor:
    """``x @ weight.T`` by the same kernel, for ``weight [outputs, inputs]``; ``outputs`` and ``inputs`` are multiples
    of 8."""
    output = x.new_empty(x.shape[0], weight.shape[0])
    return _launch(x, weight, output, tiles.columns, False, tiles, programs)
