"""Matrix products of a few rows, where only the time in which the weights arrive counts.

A program streams all inputs of a few outputs. The norm before a product, the gate of an MLP and the residual sum are
done within, and where the chip can, a product asks for its weights while the kernel before it ends: beside such a
product every pause costs as much as megabytes of weights.
"""

from typing import NamedTuple

import torch
import triton

from services.worker.layers.triton_overlap import overlapping, overlaps
from services.worker.layers.triton_skinny_kernel import product
from services.worker.layers.triton_stream import norm_rows, stream

MOST_ROWS = 16
STREAMED_ROWS = 2  # up to so many need no tensor cores
_STREAMED_ROWS_FP8 = 1  # a second row would convert all weights once more
_STREAMED_WEIGHTS = 32768  # of a program, all of them in registers
_STREAM_WARPS = 4
_SMALLEST_DOT = 8  # the smallest side of a matrix product that rows can be


class ProductOptions(NamedTuple):
    """How ``product`` is built; sizes are powers of two."""

    outputs: int  # weight rows of a program, at least 16; half as many results where they are gated
    inputs: int  # read at once, all warps together
    warps: int
    stages: int  # tiles in flight, less one


class Factor(NamedTuple):
    """What rows are multiplied with; contiguous."""

    weight: torch.Tensor  # [outputs, inputs], of the rows' dtype, or fp8
    bias: torch.Tensor | None = None  # [outputs], of the rows' dtype
    scale: torch.Tensor | None = (
        None  # [outputs] float32, of a weight in fp8: each of its rows is multiplied by its own
    )


class Handed(NamedTuple):
    """A residual stream on its way into a norm: what can be done of it column by column is done."""

    values: torch.Tensor  # [rows, size], times the norm's weight
    squares: torch.Tensor  # [parts, rows] float32; their sum over parts is that of the stream's squares


def choose_product(outputs: int, inputs: int, *, scaled: bool = False) -> ProductOptions:
    """Return the options for ``weight [outputs, inputs]``, gated or not, ``scaled`` if it is in fp8.

    As measured on an H200 for a Llama of 1B, and of 8B where the weights are in fp8, at 8 and 16 rows.
    """
    wide, narrow = outputs > 2 * inputs, inputs > 2 * outputs
    if scaled:
        return ProductOptions(32 if wide else 16, 512 if narrow else 256, 4, 4)
    if wide:
        return ProductOptions(32, 256, 4, 4)
    return ProductOptions(16, 256, 4, 6) if narrow else ProductOptions(16, 512, 4, 6)


def skinny_product(
    x: torch.Tensor | Handed,
    factor: Factor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``norm(x) @ weight.T + bias`` for ``x [rows, inputs]``, contiguous bfloat16 or float16, of up to
    ``MOST_ROWS`` rows. Sums are float32.

    ``norm``: weight ``[inputs]`` and eps of an RMS norm of ``x`` before; the norm that ``x`` was handed to, if it was.
    ``gated``: ``silu(first half) * second half`` of the outputs. ``onto [rows, outputs]``: where to add the result in
    place (``x`` itself it cannot be); it is returned then.
    """
    if isinstance(x, Handed) and norm is None:
        raise ValueError("x was handed to a norm: say which")
    outputs = factor.weight.shape[0]
    values = x.values if isinstance(x, Handed) else x
    rows = _check_rows(values)
    out = values.new_empty((rows, outputs // 2 if gated else outputs)) if onto is None else onto
    if not isinstance(x, Handed) and _streams(rows, factor, gated=gated):
        _launch_stream(x, factor, norm, gated, out, onto is not None)
    else:
        _launch_product(x, factor, norm, gated, out, onto is not None, None)
    return out


def skinny_sum(x: torch.Tensor, factor: Factor, onto: torch.Tensor, next_norm: torch.Tensor) -> torch.Tensor | Handed:
    """Add ``skinny_product`` to ``onto``, and return that as the product behind a norm takes it; ``next_norm
    [outputs]``: that norm's weight."""
    rows, (outputs, inputs) = _check_rows(x), factor.weight.shape
    if _streams(rows, factor, gated=False):
        _launch_stream(x, factor, None, False, onto, True)
        return onto
    parts = triton.cdiv(outputs, choose_product(outputs, inputs, scaled=factor.scale is not None).outputs)
    squares = torch.empty((parts, rows), dtype=torch.float32, device=x.device)
    handed = Handed(torch.empty_like(onto), squares)
    _launch_product(x, factor, None, False, onto, True, (next_norm, handed))
    return handed


def skinny_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [rows, size]`` over the root mean square of each row, times ``weight [size]``."""
    rows, size = x.shape
    out, overlap = torch.empty_like(x), overlaps(x.device)
    width = triton.next_power_of_2(size)
    norm_rows[(rows,)](x, weight, out, eps, SIZE=size, WIDTH=width, OVERLAP=overlap, **overlapping(overlap))
    return out


def _check_rows(x: torch.Tensor) -> int:
    rows = x.shape[0]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows: 1 to {MOST_ROWS} can be multiplied here")
    return rows


def _streams(rows: int, factor: Factor, *, gated: bool) -> bool:
    """Whether all inputs of an output fit into a program's registers."""
    width = triton.next_power_of_2(factor.weight.shape[1]) * (2 if gated else 1)
    most = STREAMED_ROWS if factor.scale is None else _STREAMED_ROWS_FP8
    return rows <= most and width * rows <= _STREAMED_WEIGHTS


def _launch_stream(
    x: torch.Tensor,
    factor: Factor,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
) -> None:
    (rows, inputs), size = x.shape, out.shape[1]
    weight, bias, scale = factor
    width, overlap = triton.next_power_of_2(inputs), overlaps(x.device)
    # A second row has no room beside as many weights in float32.
    results = _STREAMED_WEIGHTS // rows // width // (2 if gated else 1)
    norm_weight, eps = norm or (x, 0.0)
    stream[(triton.cdiv(size, results),)](
        x, weight, x if scale is None else scale, x if bias is None else bias, norm_weight, out, eps, INPUTS=inputs,
        OUTPUTS=weight.shape[0], ROWS=rows, SCALED=scale is not None, NORM=norm is not None, GATED=gated,
        BIAS=bias is not None, ADD=add, RESULTS=results, WIDTH=width, OVERLAP=overlap, num_warps=_STREAM_WARPS,
        **overlapping(overlap),
    )  # fmt: skip


def _launch_product(
    x: torch.Tensor | Handed,
    factor: Factor,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
    hand: tuple[torch.Tensor, Handed] | None,
) -> None:
    values, squares = x if isinstance(x, Handed) else (x, None)
    weight, bias, scale = factor
    (rows, inputs), (outputs, _), size = values.shape, weight.shape, out.shape[1]
    norm_weight, eps = norm or (values, 0.0)
    next_norm, handed = hand or (values, Handed(out, out))
    options = choose_product(outputs, inputs, scaled=scale is not None)
    padded, overlap = max(_SMALLEST_DOT, triton.next_power_of_2(rows)), overlaps(weight.device)
    product[(triton.cdiv(size, options.outputs // 2 if gated else options.outputs),)](
        values, weight, values if scale is None else scale, values if bias is None else bias, norm_weight,
        values if squares is None else squares, out, handed.values, next_norm, handed.squares, rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, FULL=rows == padded, SCALED=scale is not None,
        NORM=norm is not None and squares is None, HANDED=0 if squares is None else len(squares),
        HANDS=hand is not None, GATED=gated, BIAS=bias is not None, ADD=add, ROWS=padded, BLOCK_OUT=options.outputs,
        BLOCK_IN=options.inputs, PARTS=options.warps, STAGES=options.stages, OVERLAP=overlap,
        num_warps=options.warps, num_stages=options.stages, **overlapping(overlap),
    )  # fmt: skip
