"""Products of fp8 rows and fp8 weights with scales of blocks, on CUDA. ``block_fp8`` describes the scales.

Two implementations give the same results but for rounding: a Triton kernel for any number of rows, and cuBLAS, which
takes only some sizes. ``python -m bench.block_products`` compares them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from services.worker.layers.block_fp8 import BLOCK
from services.worker.layers.cuda_devices import fitting_stages, is_hopper, takes_ptx
from services.worker.layers.operators import operator
from services.worker.layers.triton_overlap import load_float_in_place

# From this number of rows on, cuBLAS is faster, except for weights with many outputs. Measured on an H200.
_FEWEST_CUBLAS_ROWS, _FEWEST_CUBLAS_ROWS_WIDE = 8, 65
_WIDE = 4  # outputs for each input
_CUBLAS_ROWS = 4  # cuBLAS needs a multiple of this number of rows, since columns of scales begin at 16 bytes
_CUBLAS_OUTPUTS = 16  # and of outputs
_CUBLAS_INPUTS = 512  # and of inputs, since its rows of weight scales have a multiple of four blocks
_FEWEST_PROGRAMS = 120  # about the number of multiprocessors of a Hopper GPU
_FEWEST_ROWS_FIRST = 64  # with fewer rows, the weight is the first factor, as tensor cores of Hopper need 64 rows


class BlockTile(NamedTuple):
    """The tile sizes and launch options of a product. Sizes are powers of two."""

    rows: int
    outputs: int  # at most 128, so that all weights of a step have the same scale
    warps: int
    stages: int  # pipeline stages, Triton's ``num_stages``
    group: int = 8  # row tiles that follow each other in a group, so that their weights stay in the L2 cache


_MOST = 1 << 62  # exceeds any number of rows
# By the largest number of rows. The first tile with enough programs is used, else the last.
_TILES: dict[int, tuple[BlockTile, ...]] = {
    16: (BlockTile(16, 128, 4, 5), BlockTile(16, 64, 4, 6), BlockTile(16, 32, 4, 8)),
    32: (BlockTile(32, 128, 4, 5), BlockTile(32, 64, 4, 6), BlockTile(32, 32, 4, 8)),
    256: (BlockTile(64, 128, 4, 4), BlockTile(64, 64, 4, 5), BlockTile(64, 32, 4, 6)),
    _MOST: (BlockTile(128, 64, 8, 3),),
}


@triton.jit(do_not_specialize=["rows"])
def block_products(x, x_scale, weight, weight_scale, output, rows, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                   BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr,
                   MATRIX_FIRST: tl.constexpr, STAGES: tl.constexpr, IN_PLACE: tl.constexpr):  # fmt: skip
    """Multiply a tile of rows by ``BLOCK_OUT`` rows of the weight. Grid: ``(row tiles * output tiles,)``.

    ``x_scale`` is ``[blocks, rows]``. ``IN_PLACE``: load scales in the layout in which they are used.
    """
    TILES: tl.constexpr = (OUTPUTS + BLOCK_OUT - 1) // BLOCK_OUT
    BLOCKS: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = INPUTS % BLOCK == 0

    program = tl.program_id(0)
    before = program // (GROUP * TILES) * GROUP
    size = tl.minimum(tl.cdiv(rows, ROWS) - before, GROUP)
    tile = program % (GROUP * TILES) // size
    member = (before + program % (GROUP * TILES) % size) * ROWS + tl.arange(0, ROWS)
    used = member < rows
    member = tl.minimum(member, rows - 1)  # rows outside of ``x`` compute what its last row does
    result = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inputs = tl.arange(0, BLOCK)
    row_pointers = x + member.to(tl.int64) * INPUTS
    line_pointers = weight + tl.minimum(result, OUTPUTS - 1).to(tl.int64) * INPUTS
    weight_scale += tile * BLOCK_OUT // BLOCK * BLOCKS

    # The scales of a block are loaded one iteration early, because they are no operands of the product.
    scale = load_float_in_place(x_scale + member, IN_PLACE) * tl.load(weight_scale)
    total = tl.zeros((BLOCK_OUT, ROWS) if MATRIX_FIRST else (ROWS, BLOCK_OUT), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        columns = block * BLOCK + inputs
        if MATRIX_FIRST:
            if EVEN:
                left = tl.load(line_pointers[:, None] + columns[None, :])
                right = tl.load(row_pointers[None, :] + columns[:, None])
            else:
                left = tl.load(line_pointers[:, None] + columns[None, :], (columns < INPUTS)[None, :], other=0.0)
                right = tl.load(row_pointers[None, :] + columns[:, None], (columns < INPUTS)[:, None], other=0.0)
        else:
            if EVEN:
                left = tl.load(row_pointers[:, None] + columns[None, :])
                right = tl.load(line_pointers[None, :] + columns[:, None])
            else:
                left = tl.load(row_pointers[:, None] + columns[None, :], (columns < INPUTS)[None, :], other=0.0)
                right = tl.load(line_pointers[None, :] + columns[:, None], (columns < INPUTS)[:, None], other=0.0)
        following = tl.minimum(block + 1, BLOCKS - 1)
        next_scale = load_float_in_place(x_scale + following.to(tl.int64) * rows + member, IN_PLACE)
        next_scale *= tl.load(weight_scale + following)
        product = tl.dot(left, right)
        if MATRIX_FIRST:
            total += product * scale[None, :]
        else:
            total += product * scale[:, None]
        scale = next_scale

    if MATRIX_FIRST:
        total = tl.trans(total)
    offsets = member.to(tl.int64)[:, None] * OUTPUTS + result[None, :]
    tl.store(output + offsets, total.to(output.dtype.element_ty), used[:, None] & (result < OUTPUTS)[None, :])


@operator(
    "block_fp8_product(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, ScalarType dtype) -> Tensor",
    lambda x, x_scale, weight, weight_scale, dtype: x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype),
    "CUDA",
)
def block_fp8_product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``block_fp8.block_product`` for contiguous ``x [rows, inputs]`` and its ``x_scale [rows, blocks]``."""
    if x.shape[0] >= _fewest_cublas_rows(*weight.shape) and cublas_supports(*weight.shape) and is_hopper(x.device):
        return cublas_product(x, x_scale, weight, weight_scale, dtype)
    return product_with_tile(x, x_scale, weight, weight_scale, dtype, choose_tile(x.shape[0], weight.shape[0]))


def _fewest_cublas_rows(outputs: int, inputs: int) -> int:
    return _FEWEST_CUBLAS_ROWS_WIDE if outputs > _WIDE * inputs else _FEWEST_CUBLAS_ROWS


def choose_tile(rows: int, outputs: int) -> BlockTile:
    """Return the options for a product of ``rows`` with ``weight [outputs, inputs]``."""
    tiles = next(tiles for most, tiles in _TILES.items() if rows <= most)
    for tile in tiles:
        if triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs) >= _FEWEST_PROGRAMS:
            return tile
    return tiles[-1]


def row_changes(outputs: int) -> list[int]:
    """Return the numbers of rows from which on other kernels compute ``outputs``, ascending.

    The boot runs steps on both sides of each, so that no kernel is compiled while requests are served.
    """
    last = max(most for most in _TILES if most < _MOST) + 1
    changes = [rows for rows in range(2, last + 1) if choose_tile(rows, outputs) != choose_tile(rows - 1, outputs)]
    return sorted({*changes, _FEWEST_CUBLAS_ROWS, _FEWEST_CUBLAS_ROWS_WIDE})


def product_with_tile(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    tile: BlockTile,
) -> torch.Tensor:
    """Return ``block_fp8_product`` by the Triton kernel with the options ``tile``."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    output = x.new_empty((rows, outputs), dtype=dtype)
    stages = fitting_stages(x.device, (tile.rows + tile.outputs) * BLOCK, tile.stages)
    block_products[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
        x, x_scale.t().contiguous(), weight, weight_scale, output, rows, INPUTS=inputs, OUTPUTS=outputs, BLOCK=BLOCK,
        ROWS=tile.rows, BLOCK_OUT=tile.outputs, GROUP=tile.group, MATRIX_FIRST=tile.rows < _FEWEST_ROWS_FIRST,
        STAGES=stages, IN_PLACE=takes_ptx(x.device), num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return output


def cublas_supports(outputs: int, inputs: int) -> bool:
    """Return whether ``cublas_product`` takes ``weight [outputs, inputs]``."""
    return outputs % _CUBLAS_OUTPUTS == 0 and inputs % _CUBLAS_INPUTS == 0


def cublas_product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``block_fp8_product`` by cuBLAS, if ``cublas_supports`` the sizes. It needs compute capability 9.0."""
    recipes, rows = (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128), x.shape[0]
    if rest := -rows % _CUBLAS_ROWS:
        x = torch.cat((x, x.new_zeros((rest, x.shape[1]))))
        x_scale = torch.cat((x_scale, x_scale.new_zeros((rest, x_scale.shape[1]))))
    # The scales of a block of columns are contiguous, and so are those of a block of weight rows.
    columns = x_scale.t().contiguous().t()
    product = F.scaled_mm(
        x, weight.t(), columns, recipes[0], weight_scale.t(), recipes[1], output_dtype=dtype, use_fast_accum=False
    )
    return product[:rows]
