"""Matrix products of a few rows, where only the time in which the weights arrive counts.

A program streams all inputs of a few outputs. The norm before a product, the gate of an MLP and the residual sum are
done within: beside such a product every launch costs as much as megabytes of weights.
"""

from typing import NamedTuple

import torch
import triton

from services.worker.layers.triton_skinny_kernel import product

MOST_ROWS = 8  # the smallest side of a matrix product that rows can be
# As measured on an H200 at 8 rows of a Llama of 1B: enough loads in flight, and programs enough to share them.
_OUTPUTS = 16  # weight rows of a program; half as many results where they are gated
_INPUTS = 512  # read at once, all warps together
_WARPS = 4


class Handed(NamedTuple):
    """A residual stream on its way into a norm: what can be done of it column by column is done."""

    values: torch.Tensor  # [rows, size], times the norm's weight
    squares: torch.Tensor  # [parts, rows] float32; their sum over parts is that of the stream's squares


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
    rows = (x.values if isinstance(x, Handed) else x).shape[0]
    out = weight.new_empty((rows, size)) if onto is None else onto
    _launch(x, weight, bias, norm, gated, out, onto is not None, None)
    return out


def skinny_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, onto: torch.Tensor, next_norm: torch.Tensor
) -> Handed:
    """``skinny_product`` added to ``onto``, which is then handed to the norm of weight ``next_norm [outputs]``."""
    parts = triton.cdiv(weight.shape[0], _OUTPUTS)
    squares = torch.empty((parts, x.shape[0]), dtype=torch.float32, device=x.device)
    handed = Handed(torch.empty_like(onto), squares)
    _launch(x, weight, bias, None, False, onto, True, (next_norm, handed))
    return handed


def _launch(
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
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows: 1 to {MOST_ROWS} can be multiplied here")
    scale, eps = norm or (values, 0.0)
    next_norm, handed = hand or (values, Handed(out, out))
    stages = 6 if outputs <= inputs else 4  # tiles in flight
    product[(triton.cdiv(size, _OUTPUTS // 2 if gated else _OUTPUTS),)](
        values, weight, values if bias is None else bias, scale, values if squares is None else squares, out,
        handed.values, next_norm, handed.squares, rows, eps, INPUTS=inputs, OUTPUTS=outputs, FULL=rows == MOST_ROWS,
        NORM=norm is not None and squares is None, HANDED=0 if squares is None else len(squares),
        HANDS=hand is not None, GATED=gated, BIAS=bias is not None, ADD=add, ROWS=MOST_ROWS,
        BLOCK_OUT=_OUTPUTS, BLOCK_IN=_INPUTS, PARTS=_WARPS, STAGES=stages, num_warps=_WARPS, num_stages=stages,
    )  # fmt: skip
