"""Products with integer weights that are scaled in groups of inputs, on CUDA.

Steps of a few rows run a kernel that waits only for the weights. More rows run the kernel of ``gluon_grouped`` on
Hopper, up to the number of ``_MOST_WIDE_ROWS``. On other GPUs, and for weights that it does not take, a Triton kernel
multiplies some rows. Products of more rows first write a part of the weights in 16 bits, which stays in the L2 cache
for the following product.
"""

import functools
import sys
from typing import NamedTuple

import torch
import triton

from services.worker.layers.cuda_devices import even_stages, fitting_stages, is_hopper, multiprocessors
from services.worker.layers.gluon_grouped import LINES, WARPS, Sizes, describe, grouped_wide
from services.worker.layers.grouped import GroupedWeights
from services.worker.layers.operators import operator
from services.worker.layers.triton_few_rows import SMALLEST_DOT, padded_rows, stage_bytes
from services.worker.layers.triton_grouped_kernel import grouped_rows
from services.worker.layers.triton_grouped_wide import grouped_dequantize, grouped_sum, grouped_tiles
from services.worker.layers.triton_overlap import overlapping, overlaps

MOST_ROWS = 16  # of ``grouped_rows``
# By the largest number of weights: the largest number of rows for which dequantization is a part of the product.
# Measured on an H200, as the options below.
_FUSED_ROWS = {1 << 23: 64, 1 << 24: 128}
MOST_FUSED_ROWS = 256  # for more weights
_SMALL_GROUP, _MANY_OUTPUTS = 32, 4096  # of weights for which a few rows have larger blocks
_SLICE_BYTES = 32 << 20  # of dequantized weights that are multiplied at once
_LONG = 2  # inputs for each output
_SMALLEST_SLICE = 1024  # outputs
_PROGRAMS = 132  # the number of SMs
_MOST_SPLITS = 8
_FEWEST_TILES = 8  # of inputs that are worth another program
_SUMMED = 1024  # elements per program of ``grouped_sum``
_DEQUANTIZED_OUTPUTS = 64  # per program
_SMALLEST_WIDE_ROWS, _LARGEST_WIDE_ROWS = 32, 256  # of a block of ``grouped_wide``
_FEWEST_WIDE_ROWS = 33  # without offsets
# By the bits of a weight and the inputs of a group: the largest number of rows for which ``grouped_wide`` is faster
# than a product of dequantized slices, which are dequantized once for all rows.
_MOST_WIDE_ROWS = {(4, 32): 3072, (8, 32): 1536, (8, 128): 1536}
_WIDE_TILE = 64  # the smallest number of inputs of a tile
_WIDE_MULTIPLE = 8  # of outputs, since rows of results begin at 16 bytes
# Slots of the rings of rows and of codes, by the rows of a block. They fit into the shared memory of Hopper.
_WIDE_SLOTS = {32: (8, 5), 64: (8, 5), 128: (6, 4), 256: (4, 3)}
_WIDE_SLOTS_8_BITS = _WIDE_SLOTS | {256: (4, 2)}


class RowsOptions(NamedTuple):
    """The tile sizes and launch options of ``grouped_rows``. Sizes are powers of two."""

    outputs: int  # weight rows per program, at least 16; a gated program has half this number of results
    inputs: int  # inputs per iteration, for all warps together; at least 128 for each warp
    warps: int
    stages: int  # pipeline stages, Triton's ``num_stages``


class TilesOptions(NamedTuple):
    """The tile sizes and launch options of ``grouped_tiles``. Sizes are powers of two."""

    rows: int
    outputs: int
    splits: int  # of the inputs
    scale_sums: bool
    warps: int
    stages: int


class WideOptions(NamedTuple):
    """The block size and launch options of ``grouped_wide``."""

    rows: int
    slots: int
    code_slots: int


def choose_rows(rows: int, weights: GroupedWeights) -> RowsOptions:
    """Return the options for ``rows`` rows, gated or not.

    They were measured like those of ``choose_product``, with weights of 4 and 8 bits in groups of 128. Those of small
    groups were measured with the matrices of a Llama of 8B.
    """
    outputs, _ = weights.shape
    # Rows are read again for each block of outputs. Therefore many rows have larger blocks. With small groups, few rows
    # are faster with them, too.
    wide = RowsOptions(32, 512, 4, 3)
    is_small = weights.group <= _SMALL_GROUP and outputs >= _MANY_OUTPUTS
    options = RowsOptions(16, 1024, 4, 3) if rows <= SMALLEST_DOT and not is_small else wide
    programs = triton.cdiv(outputs, options.outputs)
    stages = even_stages(weights.codes.device, programs, _stage_bytes(rows, weights, options))
    return wide if stages is None else options._replace(stages=stages)


def choose_tiles(outputs: int, inputs: int, rows: int, weights: GroupedWeights) -> TilesOptions:
    """Return the options for ``rows`` rows. There are enough programs for all SMs, if the inputs can be split so."""
    scale_sums = weights.offsets is None
    # Sums of at most 64 rows can be scaled in registers, which is faster than to scale weights, also for more rows.
    # GPUs before compute capability 9.0 may have too little shared memory for 256 rows.
    most_rows = 256 if overlaps(weights.codes.device) else 128
    most_rows = 64 if scale_sums and inputs <= _LONG * outputs else most_rows
    padded = min(most_rows, max(16, triton.next_power_of_2(rows)))
    scale_sums &= padded <= 64
    small = padded <= 128
    block, warps = (64, 4) if small else (128, 8)
    programs = triton.cdiv(rows, padded) * triton.cdiv(outputs, block)
    # Of programs with small tiles, an SM runs two at once. More splits also write and read more sums.
    most, tiles, splits = (2 if small else 1) * _PROGRAMS, inputs // weights.tile, 1
    while splits < _MOST_SPLITS and programs * splits * 2 <= most and tiles >= splits * _FEWEST_TILES:
        splits *= 2
    # Three stages of 256 rows and bytes would take nearly all shared memory.
    stages = 4 if padded <= 64 else 2 if padded == 256 and weights.bits == 8 else 3
    return TilesOptions(padded, block, splits, scale_sums, warps, stages)


def supports_wide(weights: GroupedWeights) -> bool:
    """Return whether ``grouped_wide`` takes ``weights``.

    It rounds offsets to the dtype of the rows. Those of 8-bit weights are too large for that in bfloat16.
    """
    outputs, _ = weights.shape
    fine = weights.bits == 4 or weights.offsets is None
    return (
        is_hopper(weights.codes.device) and weights.wide_tile >= _WIDE_TILE and outputs % _WIDE_MULTIPLE == 0 and fine
    )


def _wide_rows(weights: GroupedWeights) -> range:
    """Return the numbers of rows for which ``grouped_wide`` is the fastest kernel. Measured on an H200."""
    if not supports_wide(weights):
        return range(0)
    most = _MOST_WIDE_ROWS.get((weights.bits, weights.group), sys.maxsize)
    return range(MOST_ROWS + 1 if weights.offsets is not None else _FEWEST_WIDE_ROWS, most + 1)


def choose_wide(rows: int, weights: GroupedWeights) -> WideOptions:
    """Return the options of ``grouped_wide`` for ``rows`` rows."""
    padded = min(_LARGEST_WIDE_ROWS, max(_SMALLEST_WIDE_ROWS, triton.next_power_of_2(rows)))
    return WideOptions(padded, *(_WIDE_SLOTS if weights.bits == 4 else _WIDE_SLOTS_8_BITS)[padded])


def most_fused_rows(outputs: int, inputs: int) -> int:
    """Return the largest number of rows for which dequantization is a part of the product."""
    return next((rows for size, rows in _FUSED_ROWS.items() if outputs * inputs <= size), MOST_FUSED_ROWS)


def row_changes(weights: GroupedWeights) -> list[int]:
    """Return the numbers of rows from which on other kernels compute the product, ascending.

    The boot runs steps on both sides of each, so that no kernel is compiled while requests are served.
    """
    outputs, inputs = weights.shape
    wide, most_wide = _wide_rows(weights), set(_MOST_WIDE_ROWS.values())

    def kernel(rows: int) -> object:
        if rows <= MOST_ROWS:
            return choose_rows(rows, weights), padded_rows(rows)
        if rows in wide:
            return choose_wide(rows, weights)
        return choose_tiles(outputs, inputs, rows, weights) if rows <= most_fused_rows(outputs, inputs) else None

    tried = [*range(2, MOST_FUSED_ROWS + 2), *(rows + 1 for rows in sorted(most_wide))]
    return [rows for rows in tried if kernel(rows) != kernel(rows - 1)]


def _stage_bytes(rows: int, weights: GroupedWeights, options: RowsOptions) -> int:
    """Return the size of a pipeline stage of ``grouped_rows``, with the scales and offsets of the groups."""
    factors = options.outputs * options.inputs // weights.group * (1 if weights.offsets is None else 2)
    return stage_bytes(rows, options.outputs, options.inputs, weights.bits) + 4 * factors


@operator(
    "grouped_product(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? bias, int bits) -> Tensor",
    lambda x, codes, *_: x.new_empty((x.shape[0], codes.shape[0])),
)
def grouped_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, ``[rows, outputs]``, for ``x [rows, inputs]`` in bfloat16 or float16."""
    weights, rows = GroupedWeights(codes, scales, offsets, bias, bits), x.shape[0]
    if weights.floats:
        raise TypeError("there is no product of a linear layer with weights in MXFP4")
    x = x.contiguous()
    out = x.new_empty((rows, weights.shape[0]))
    if not rows:
        return out
    if rows <= MOST_ROWS:
        launch_rows(x, weights, out)
    elif rows in _wide_rows(weights):
        launch_wide(x, weights, out)
    elif rows <= most_fused_rows(*weights.shape):
        launch_tiles(x, weights, out)
    else:
        multiply_slices(x, weights, out)
    return out


def launch_rows(
    x: torch.Tensor,
    weights: GroupedWeights,
    out: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    squares: torch.Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    prepare: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    overlap: bool = False,
    options: RowsOptions | None = None,
) -> None:
    """Write the product of at most ``MOST_ROWS`` rows to ``out``, or add it with ``add``.

    ``norm`` and ``gated`` are as in ``skinny_product``. ``squares`` are those of a ``NormInput`` whose values are
    ``x``. ``prepare`` are the weight of the next norm and the tensors of a ``NormInput`` to write. ``overlap``: start
    while the kernel before ends. ``options``: None = choose them.
    """
    rows, size = x.shape[0], out.shape[1]
    options = options or choose_rows(rows, weights)
    norm_weight, eps = norm or (x, 0.0)
    next_norm, next_values, next_squares = prepare or (x, out, out)
    constants = weights.constants()
    stages = fitting_stages(x.device, _stage_bytes(rows, weights, options), options.stages)
    grouped_rows[(triton.cdiv(size, options.outputs // 2 if gated else options.outputs),)](
        x, weights.codes, weights.scales, weights.scales if weights.offsets is None else weights.offsets,
        x if weights.bias is None else weights.bias, norm_weight, x if squares is None else squares, out, next_values,
        next_norm, next_squares, rows, eps, **constants, NORM=norm is not None and squares is None,
        PREPARED=0 if squares is None else len(squares), PREPARES=prepare is not None, GATED=gated,
        BIAS=weights.bias is not None, ADD=add, ROWS=padded_rows(rows),
        BLOCK_OUT=options.outputs, TILES=options.inputs // constants["TILE"], STAGES=stages, OVERLAP=overlap,
        num_warps=options.warps, num_stages=stages, **overlapping(overlap),
    )  # fmt: skip


def launch_tiles(
    x: torch.Tensor, weights: GroupedWeights, out: torch.Tensor, options: TilesOptions | None = None
) -> None:
    """Write the product of any number of rows to ``out``. ``options``: None = choose them."""
    (outputs, inputs), rows = weights.shape, x.shape[0]
    options = options or choose_tiles(outputs, inputs, rows, weights)
    splits, whole = options.splits, options.splits == 1
    stage = weights.tile * (options.outputs * weights.bits // 8 + options.rows * x.itemsize)
    stages = fitting_stages(x.device, stage, options.stages)
    sums = out if whole else torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    bias = x if weights.bias is None else weights.bias
    grouped_tiles[(triton.cdiv(rows, options.rows), triton.cdiv(outputs, options.outputs), splits)](
        x, weights.codes, weights.scales, weights.scales if weights.offsets is None else weights.offsets, bias, sums,
        rows, **weights.constants(), BIAS=whole and weights.bias is not None, SPLITS=splits,
        SCALE_SUMS=options.scale_sums, ROWS=options.rows, BLOCK_OUT=options.outputs, STAGES=stages,
        num_warps=options.warps, num_stages=stages,
    )  # fmt: skip
    if not whole:
        grouped_sum[(triton.cdiv(out.numel(), _SUMMED),)](
            sums, out if weights.bias is None else weights.bias, out, out.numel(), OUTPUTS=outputs,
            BIAS=weights.bias is not None, SPLITS=splits, BLOCK=_SUMMED,
        )  # fmt: skip


def launch_wide(
    x: torch.Tensor, weights: GroupedWeights, out: torch.Tensor, options: WideOptions | None = None
) -> None:
    """Write the product of any number of rows to ``out``, if ``supports_wide``. ``options``: None = choose them."""
    (outputs, inputs), rows, tile = weights.shape, x.shape[0], weights.wide_tile
    options = options or choose_wide(rows, weights)
    sizes = Sizes(
        inputs, outputs, weights.bits, weights.group, tile, weights.offsets is not None, weights.bias is not None,
        options.rows, LINES, options.slots, options.code_slots,
    )  # fmt: skip
    blocks = triton.cdiv(rows, options.rows) * triton.cdiv(outputs, LINES)
    shared, parts = share_blocks(blocks, inputs // tile, multiprocessors(x.device))
    sums = torch.empty((shared * parts, LINES, options.rows), dtype=torch.float32, device=x.device)
    codes = weights.codes.view(torch.int16)
    grouped_wide[(min(blocks - shared + shared * parts, multiprocessors(x.device)),)](
        describe(x, (options.rows, tile // 2)), describe(codes, (LINES, tile * weights.bits // 16)),
        weights.scales, weights.scales if weights.offsets is None else weights.offsets,
        x if weights.bias is None else weights.bias, describe(out, (options.rows, LINES)), sums, _flags(x.device),
        rows, shared, parts, C=sizes, num_warps=WARPS,
    )  # fmt: skip


def share_blocks(blocks: int, tiles: int, programs: int) -> tuple[int, int]:
    """Return the number of the last blocks that are shared, and the number of programs of each.

    A block has ``tiles`` of inputs. ``programs`` run at the same time.
    """
    last = blocks % programs
    parts = min(programs // last, max(1, tiles // _FEWEST_TILES)) if last else 1
    return (last, parts) if parts > 1 else (0, 1)


@functools.cache
def _flags(device: torch.device) -> torch.Tensor:
    """Return the flags of ``grouped_wide``. All products of a device must run on one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product of a device cannot be captured in a graph; run one before")
    return torch.zeros(multiprocessors(device), dtype=torch.int32, device=device)


def multiply_slices(x: torch.Tensor, weights: GroupedWeights, out: torch.Tensor) -> None:
    """Write the product of many rows to ``out``, with torch's product of dequantized slices of the outputs."""
    outputs, inputs = weights.shape
    count = max(_SMALLEST_SLICE, _SLICE_BYTES // (inputs * x.element_size()))
    count = min(outputs, count // _DEQUANTIZED_OUTPUTS * _DEQUANTIZED_OUTPUTS)
    constants, matrix = weights.constants(), x.new_empty((count, inputs))
    for first in range(0, outputs, count):
        size = min(count, outputs - first)
        grouped_dequantize[(triton.cdiv(size, _DEQUANTIZED_OUTPUTS), inputs // int(constants["TILE"]))](
            weights.codes, weights.scales, weights.scales if weights.offsets is None else weights.offsets, matrix,
            first, **constants, BLOCK_OUT=_DEQUANTIZED_OUTPUTS, num_warps=4,
        )  # fmt: skip
        part, place = matrix[:size].t(), out[:, first : first + size]
        if weights.bias is None:
            torch.mm(x, part, out=place)
        else:
            torch.addmm(weights.bias[first : first + size], x, part, out=place)
