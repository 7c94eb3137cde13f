"""Matrix products of up to 16 rows, where only the time in which the weights arrive counts.

A program streams all inputs of a few outputs. The norm before a product, the gate of an MLP and the residual sum are
done within: beside such a product every launch costs as much as megabytes of weights.
"""

from typing import NamedTuple

import torch
import triton

from services.worker.layers.triton_skinny_kernel import product

MOST_ROWS = 16
# The smallest side of a matrix product that rows can be.
_SMALLEST_DOT = 8
# Of each weight row's beginning, asked for while the kernel before still runs.
_OWN_BYTES = 4096


class SkinnyOptions(NamedTuple):
    """How the kernel is built; sizes are powers of two."""

    outputs: int  # weight rows of a program, at least 16; half as many results where they are gated
    inputs: int  # read at once, all warps together
    split: int  # parts of ``inputs`` that are multiplied apart, best one a warp; 0 = no tensor cores
    warps: int
    stages: int  # tiles in flight


class Handed(NamedTuple):
    """A residual stream on its way into a norm: what can be done of it column by column is done."""

    values: torch.Tensor  # [rows, size], times the norm's weight
    squares: torch.Tensor  # [parts, rows] float32; their sum over parts is that of the stream's squares


class Ahead(NamedTuple):
    """Weights that a later kernel reads, brought to the L2 cache as soon as this one has read its own."""

    weight: torch.Tensor  # contiguous
    bytes: int  # of its beginning


def choose_options(outputs: int, inputs: int) -> SkinnyOptions:
    """For ``weight [outputs, inputs]``, gated or not."""
    # As measured on an H200 at 8 rows of a Llama of 1B: enough loads in flight, and programs enough to share them.
    keys = min(512, triton.next_power_of_2(inputs))
    return SkinnyOptions(16, keys, 4, 4, 6 if outputs <= inputs else 4)


def skinny_product(
    x: torch.Tensor | Handed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    onto: torch.Tensor | None = None,
    ahead: tuple[Ahead, ...] = (),
    options: SkinnyOptions | None = None,
    pdl: bool = False,
    own_bytes: int = _OWN_BYTES,
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias``: ``x [rows, inputs]``, ``weight [outputs, inputs]``, ``bias [outputs]``, all
    contiguous and of one dtype (bfloat16 or float16; sums are float32); up to ``MOST_ROWS`` rows.

    ``norm``: weight ``[inputs]`` and eps of an RMS norm of ``x`` before; the norm that ``x`` was handed to, if it was.
    ``gated``: ``silu(first half) * second half`` of the outputs. ``onto [rows, outputs]``: where to add the result in
    place (``x`` itself it cannot be); it is returned then. ``ahead``: up to two. ``pdl``: start while the kernel before
    ends, and let the next one do so; sm_90 and later, and the next one must be an ordinary kernel or wait for this one
    itself. ``own_bytes``: of each weight row, asked for before that wait.
    """
    if isinstance(x, Handed) and norm is None:
        raise ValueError("x was handed to a norm: say which")
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    rows = (x.values if isinstance(x, Handed) else x).shape[0]
    out = weight.new_empty((rows, size)) if onto is None else onto
    _launch(x, weight, bias, norm, gated, out, onto is not None, None, ahead, options, pdl, own_bytes)
    return out


def skinny_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    onto: torch.Tensor,
    next_norm: torch.Tensor,
    *,
    options: SkinnyOptions | None = None,
    pdl: bool = False,
    own_bytes: int = _OWN_BYTES,
) -> Handed:
    """``skinny_product`` added to ``onto``, which is then handed to the norm of weight ``next_norm [outputs]``."""
    built = options or choose_options(*weight.shape)
    parts = triton.cdiv(weight.shape[0], built.outputs)
    squares = torch.empty((parts, x.shape[0]), dtype=torch.float32, device=x.device)
    handed = Handed(torch.empty_like(onto), squares)
    _launch(x, weight, bias, None, False, onto, True, (next_norm, handed), (), built, pdl, own_bytes)
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
    ahead: tuple[Ahead, ...],
    options: SkinnyOptions | None,
    pdl: bool,
    own_bytes: int,
) -> None:
    values, squares = x if isinstance(x, Handed) else (x, None)
    (rows, inputs), (outputs, _), size = values.shape, weight.shape, out.shape[1]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows: 1 to {MOST_ROWS} can be multiplied here")
    built = options or choose_options(outputs, inputs)
    padded = triton.next_power_of_2(rows)
    if built.split:
        padded = max(_SMALLEST_DOT, padded)
    scale, eps = norm or (values, 0.0)
    next_norm, handed = hand or (values, Handed(out, out))
    prefetched = [*((each.weight, each.bytes // 16 * 16) for each in ahead), (values, 0), (values, 0)][:2]
    row_bytes = inputs * weight.element_size()
    # What is asked for must be aligned.
    own = min(own_bytes, row_bytes) // 16 * 16 if pdl and row_bytes % 16 == 0 else 0
    product[(triton.cdiv(size, built.outputs // 2 if gated else built.outputs),)](
        values, weight, values if bias is None else bias, scale, values if squares is None else squares, out,
        handed.values, next_norm, handed.squares, prefetched[0][0], prefetched[1][0], rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, ROWS=padded, BLOCK_OUT=built.outputs, BLOCK_IN=built.inputs, SPLIT=built.split,
        FULL=rows == padded, NORM=norm is not None and squares is None, HANDED=0 if squares is None else len(squares),
        HANDS=hand is not None, GATED=gated, BIAS=bias is not None, ADD=add, PDL=pdl,
        OWN=own, AHEAD=prefetched[0][1], FURTHER=prefetched[1][1],
        STAGES=built.stages, num_warps=built.warps, num_stages=built.stages,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
