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
_STREAMED_WEIGHTS = 32768  # of a program, all of them in registers
_STREAM_WARPS = 4
_SMALLEST_DOT = 8  # the smallest side of a matrix product that rows can be


class ProductOptions(NamedTuple):
    """How ``product`` is built; sizes are powers of two."""

    outputs: int  # weight rows of a program, at least 16; half as many results where they are gated
    inputs: int  # read at once, all warps together
    warps: int
    stages: int  # tiles in flight, less one


class Handed(NamedTuple):
    """A residual stream on its way into a norm: what can be done of it column by column is done."""

    values: torch.Tensor  # [rows, size], times the norm's weight
    squares: torch.Tensor  # [parts, rows] float32; their sum over parts is that of the stream's squares


def choose_product(outputs: int, inputs: int) -> ProductOptions:
    """For ``weight [outputs, inputs]``, gated or not: as measured on an H200 at 16 rows of a Llama of 1B."""
    if outputs > 2 * inputs:
        return ProductOptions(32, 256, 4, 4)
    return ProductOptions(16, 256, 4, 6) if inputs > 2 * outputs else ProductOptions(16, 512, 4, 6)


def skinny_product(
    x: torch.Tensor | Handed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias``: ``x [rows, inputs]``, ``weight [outputs, inputs]``, ``bias [outputs]``, all
    contiguous and of one dtype (bfloat16 or float16; sums are float32); up to ``MOST_ROWS`` rows.

    ``norm``: weight ``[inputs]`` and eps of an RMS norm of ``x`` before; the norm that ``x`` was handed to, if it was.
    ``gated``: ``silu(first half) * second half`` of the outputs. ``onto [rows, outputs]``: where to add the result in
    place (``x`` itself it cannot be); it is returned then.
    """
    if isinstance(x, Handed) and norm is None:
        raise ValueError("x was handed to a norm: say which")
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    rows = _check_rows(x.values if isinstance(x, Handed) else x)
    out = weight.new_empty((rows, size)) if onto is None else onto
    if not isinstance(x, Handed) and _streams(rows, weight.shape[1], gated):
        _launch_stream(x, weight, bias, norm, gated, out, onto is not None)
    else:
        _launch_product(x, weight, bias, norm, gated, out, onto is not None, None)
    return out


def skinny_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, onto: torch.Tensor, next_norm: torch.Tensor
) -> torch.Tensor | Handed:
    """``skinny_product`` added to ``onto``, which comes back as the product behind a norm takes it; ``next_norm
    [outputs]``: that norm's weight."""
    rows, (outputs, inputs) = _check_rows(x), weight.shape
    if _streams(rows, inputs, gated=False):
        _launch_stream(x, weight, bias, None, False, onto, True)
        return onto
    parts = triton.cdiv(outputs, choose_product(outputs, inputs).outputs)
    squares = torch.empty((parts, rows), dtype=torch.float32, device=x.device)
    handed = Handed(torch.empty_like(onto), squares)
    _launch_product(x, weight, bias, None, False, onto, True, (next_norm, handed))
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


def _streams(rows: int, inputs: int, gated: bool) -> bool:
    """Whether all inputs of an output fit into a program's registers."""
    return rows <= STREAMED_ROWS and triton.next_power_of_2(inputs) * (2 if gated else 1) * rows <= _STREAMED_WEIGHTS


def _launch_stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
) -> None:
    (rows, inputs), size = x.shape, out.shape[1]
    width, overlap = triton.next_power_of_2(inputs), overlaps(x.device)
    # A second row has no room beside as many weights in float32.
    results = _STREAMED_WEIGHTS // rows // width // (2 if gated else 1)
    scale, eps = norm or (x, 0.0)
    stream[(triton.cdiv(size, results),)](
        x, weight, x if bias is None else bias, scale, out, eps, INPUTS=inputs, OUTPUTS=weight.shape[0], ROWS=rows,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, ADD=add, RESULTS=results, WIDTH=width,
        OVERLAP=overlap, num_warps=_STREAM_WARPS, **overlapping(overlap),
    )  # fmt: skip


def _launch_product(
    x: torch.Tensor | Handed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    out: torch.Tensor,
    add: bool,
    hand: tuple[torch.Tensor, Handed] | None,
) -> None:
    values, squares = x if isinstance(x, Handed) else (x, None)
    (rows, inputs), (outputs, _), size = values.shape, weight.shape, out.shape[1]
    scale, eps = norm or (values, 0.0)
    next_norm, handed = hand or (values, Handed(out, out))
    options = choose_product(outputs, inputs)
    padded, overlap = max(_SMALLEST_DOT, triton.next_power_of_2(rows)), overlaps(weight.device)
    product[(triton.cdiv(size, options.outputs // 2 if gated else options.outputs),)](
        values, weight, values if bias is None else bias, scale, values if squares is None else squares, out,
        handed.values, next_norm, handed.squares, rows, eps, INPUTS=inputs, OUTPUTS=outputs, FULL=rows == padded,
        NORM=norm is not None and squares is None, HANDED=0 if squares is None else len(squares),
        HANDS=hand is not None, GATED=gated, BIAS=bias is not None, ADD=add, ROWS=padded, BLOCK_OUT=options.outputs,
        BLOCK_IN=options.inputs, PARTS=options.warps, STAGES=options.stages, OVERLAP=overlap,
        num_warps=options.warps, num_stages=options.stages, **overlapping(overlap),
    )  # fmt: skip
