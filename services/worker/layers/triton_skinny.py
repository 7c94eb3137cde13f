"""Matrix products of a few rows, whose time is the time to read the weights from memory.

A program reads the weights of a few outputs. The norm before a product, the gate of an MLP and the residual sum are
parts of the product's kernel. If the GPU supports it, a product starts to load its weights while the kernel before it
ends, because a pause between two such products takes as long as loading megabytes of weights.
"""

from typing import NamedTuple

import torch
import triton

from services.worker.layers.block_fp8 import BLOCK
from services.worker.layers.cuda_devices import even_stages, fitting_stages, takes_ptx
from services.worker.layers.grouped import GroupedWeights
from services.worker.layers.triton_few_rows import SMALLEST_DOT, padded_rows, stage_bytes
from services.worker.layers.triton_grouped import choose_rows, launch_rows
from services.worker.layers.triton_overlap import overlapping, overlaps
from services.worker.layers.triton_skinny_kernel import product
from services.worker.layers.triton_stream import norm_rows, stream

MOST_ROWS = 16
_STREAMED_WEIGHTS = 32768  # of a program for one row, all in registers
_STREAM_WARPS = 4


class ProductOptions(NamedTuple):
    """The tile sizes and launch options of ``product``. Sizes are powers of two."""

    outputs: int  # weight rows per program, at least 16; a gated program has half this number of results
    inputs: int  # inputs per tile, for all warps together
    warps: int
    stages: int  # pipeline stages, Triton's ``num_stages``


class LinearWeights(NamedTuple):
    """The tensors of a linear layer, all contiguous."""

    weight: torch.Tensor  # [outputs, inputs], of the rows' dtype, or fp8
    bias: torch.Tensor | None = None  # [outputs], of the rows' dtype
    # Float32 scales of a weight in fp8: [outputs], or those of blocks of 128 x 128, [row blocks, column blocks]
    scale: torch.Tensor | None = None

    @property
    def scaled(self) -> int:
        """Kind of the scales, as in the kernels: 0 for none, 1 for those of rows, else the size of a block."""
        return 0 if self.scale is None else 1 if self.scale.dim() == 1 else BLOCK

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        outputs, inputs = self.weight.shape
        return outputs, inputs


class NormInput(NamedTuple):
    """A residual stream that the product before an RMS norm has prepared for this norm.

    The product after the norm only divides each row by its root mean square.
    """

    values: torch.Tensor  # [rows, size], multiplied by the norm's weight
    squares: torch.Tensor  # [parts, rows] float32; the sum over parts is the sum of the row's squares


def choose_product(rows: int, linear: LinearWeights) -> ProductOptions:
    """Return the options for ``rows`` rows, gated or not.

    They were measured on an H200 in graphs of whole layers, since kernels overlap. Layers were those of Llamas of 1B
    and 8B and of a Qwen3 of 4B, weights bfloat16 and fp8, and steps of 2 to 16 rows.
    """
    outputs, _ = linear.shape
    options = ProductOptions(16, 512, 4, 3)
    programs = triton.cdiv(outputs, options.outputs)
    stages = even_stages(linear.weight.device, programs, _stage_bytes(rows, linear, options))
    if stages is not None:
        return options._replace(stages=stages)
    # Small tiles let about six programs run at the same time. Rows are read again for each block of outputs.
    # Therefore many rows have larger blocks.
    few = rows <= SMALLEST_DOT
    if linear.scale is None:
        return ProductOptions(16 if few else 32, 256, 4, 4)
    return options if few else ProductOptions(32, 512, 4, 3)


def skinny_product(
    x: torch.Tensor | NormInput,
    linear: LinearWeights | GroupedWeights,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``norm(x) @ weight.T + bias``.

    ``x [rows, inputs]`` is contiguous, bfloat16 or float16, and has at most ``MOST_ROWS`` rows. Sums are float32.

    ``norm`` is the weight ``[inputs]`` and eps of an RMS norm of ``x``. A ``NormInput`` needs the norm that it was
    prepared for. With ``gated``, the result is ``silu(first half) * second half`` of the outputs. With ``onto [rows,
    outputs]``, which must not be ``x``, the result is added to it in place, and it is returned. Raises ``ValueError``.
    """
    if isinstance(x, NormInput) and norm is None:
        raise ValueError("x was prepared for a norm, but norm is None; pass the norm")
    outputs = linear.shape[0]
    values = x.values if isinstance(x, NormInput) else x
    rows = _check_rows(values)
    out = values.new_empty((rows, outputs // 2 if gated else outputs)) if onto is None else onto
    if isinstance(linear, LinearWeights) and not isinstance(x, NormInput) and _streams(rows, linear, gated=gated):
        _launch_stream(x, linear, norm, gated, out, onto is not None)
    else:
        _launch_product(x, linear, norm, gated, out, onto is not None, None)
    return out


def skinny_sum(
    x: torch.Tensor, linear: LinearWeights | GroupedWeights, onto: torch.Tensor, next_norm: torch.Tensor
) -> torch.Tensor | NormInput:
    """Add ``skinny_product`` to ``onto`` in place, and return the sum as input of the product after the next norm.

    ``next_norm [outputs]`` is the weight of that norm.
    """
    rows, (outputs, _) = _check_rows(x), linear.shape
    if isinstance(linear, LinearWeights) and _streams(rows, linear, gated=False):
        _launch_stream(x, linear, None, False, onto, True)
        return onto
    if isinstance(linear, GroupedWeights):
        block = choose_rows(rows, linear).outputs
    else:
        block = choose_product(rows, linear).outputs
    parts = triton.cdiv(outputs, block)
    squares = torch.empty((parts, rows), dtype=torch.float32, device=x.device)
    norm_input = NormInput(torch.empty_like(onto), squares)
    _launch_product(x, linear, None, False, onto, True, (next_norm, norm_input))
    return norm_input


def skinny_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of ``x [rows, size]``, scaled by ``weight [size]``."""
    rows, size = x.shape
    out, overlap = torch.empty_like(x), overlaps(x.device)
    width = triton.next_power_of_2(size)
    norm_rows[(rows,)](x, weight, out, eps, SIZE=size, WIDTH=width, OVERLAP=overlap, **overlapping(overlap))
    return out


def _check_rows(x: torch.Tensor) -> int:
    rows = x.shape[0]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"x has {rows} rows: expected 1 to {MOST_ROWS}")
    return rows


def _stage_bytes(rows: int, linear: LinearWeights, options: ProductOptions) -> int:
    """Return the size of a pipeline stage of ``product``."""
    return stage_bytes(rows, options.outputs, options.inputs, 8 * linear.weight.itemsize)


def _streams(rows: int, linear: LinearWeights, *, gated: bool) -> bool:
    """Return whether ``stream`` can run: there is one row, and all inputs of an output fit into the registers."""
    width = triton.next_power_of_2(linear.weight.shape[1]) * (2 if gated else 1)
    return rows == 1 and width <= _STREAMED_WEIGHTS


def _launch_stream(
    x: torch.Tensor,
    linear: LinearWeights,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
) -> None:
    inputs, size = x.shape[1], out.shape[1]
    weight, bias, scale = linear
    width, overlap = triton.next_power_of_2(inputs), overlaps(x.device)
    results = _STREAMED_WEIGHTS // width // (2 if gated else 1)
    if linear.scaled > 1:
        results = min(results, linear.scaled)
    norm_weight, eps = norm or (x, 0.0)
    stream[(triton.cdiv(size, results),)](
        x, weight, x if scale is None else scale, x if bias is None else bias, norm_weight, out, eps, INPUTS=inputs,
        OUTPUTS=weight.shape[0], SCALED=linear.scaled, NORM=norm is not None, GATED=gated,
        BIAS=bias is not None, ADD=add, RESULTS=results, WIDTH=width, OVERLAP=overlap, num_warps=_STREAM_WARPS,
        **overlapping(overlap),
    )  # fmt: skip


def _launch_product(
    x: torch.Tensor | NormInput,
    linear: LinearWeights | GroupedWeights,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
    prepare: tuple[torch.Tensor, NormInput] | None,
) -> None:
    values, squares = x if isinstance(x, NormInput) else (x, None)
    if isinstance(linear, GroupedWeights):
        prepared = None if prepare is None else (prepare[0], *prepare[1])
        launch_rows(values, linear, out, norm=norm, squares=squares, gated=gated, add=add, prepare=prepared,
                    overlap=overlaps(values.device))  # fmt: skip
        return
    weight, bias, scale = linear
    (rows, inputs), (outputs, _), size = values.shape, weight.shape, out.shape[1]
    norm_weight, eps = norm or (values, 0.0)
    next_norm, norm_input = prepare or (values, NormInput(out, out))
    options = choose_product(rows, linear)
    padded, overlap = padded_rows(rows), overlaps(weight.device)
    stages = fitting_stages(weight.device, _stage_bytes(rows, linear, options), options.stages)
    product[(triton.cdiv(size, options.outputs // 2 if gated else options.outputs),)](
        values, weight, values if scale is None else scale, values if bias is None else bias, norm_weight,
        values if squares is None else squares, out, norm_input.values, next_norm, norm_input.squares, rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, FULL=rows == padded, SCALED=linear.scaled,
        NORM=norm is not None and squares is None, PREPARED=0 if squares is None else len(squares),
        PREPARES=prepare is not None, GATED=gated, BIAS=bias is not None, ADD=add, ROWS=padded,
        BLOCK_OUT=options.outputs, BLOCK_IN=options.inputs, PARTS=options.warps, STAGES=stages, OVERLAP=overlap,
        ASM=takes_ptx(weight.device), num_warps=options.warps, num_stages=stages, **overlapping(overlap),
    )  # fmt: skip
