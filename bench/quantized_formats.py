"""Formats of published checkpoints for ``bench.quantization_error``: weights are rounded to the values of a format.

Each value is rounded to the nearest one, without the calibration of GPTQ and AWQ. The tools that make such checkpoints
are not needed, only ``gguf``. Its K quants and IQ quants are missing, because the library reads them only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from services.worker.layers.fp8 import FP8, LARGEST, SMALLEST
from services.worker.layers.linear import Linear
from services.worker.models.decoder import DecoderModel
from services.worker.models.experts import Experts

Rounding = Callable[[torch.Tensor], torch.Tensor]
WHOLE = 0  # in a block: all rows, or all columns


@dataclass(frozen=True)
class Format:
    """The rounding of matrices ``[outputs, inputs]`` float32, and that of the inputs of products ``[rows, inputs]``."""

    weights: Rounding
    inputs: Rounding | None = None


def blocks(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return ``matrix`` as ``[blocks of rows, rows, blocks of columns, columns]``, padded with zeros."""
    height, width = matrix.shape
    rows, columns = rows or height, columns or width
    padded = F.pad(matrix, (0, -width % columns, 0, -height % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _joined(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of ``blocks`` as a matrix of the shape of ``like``."""
    return values.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def to_fp8(matrix: torch.Tensor, *, rows: int, columns: int) -> torch.Tensor:
    """Round to E4M3 with a float32 scale for each block of ``rows`` and ``columns``."""
    parts = blocks(matrix, rows, columns)
    scale = parts.abs().amax((1, 3), keepdim=True).clamp(min=SMALLEST) / LARGEST
    return _joined((parts / scale).to(FP8).float() * scale, matrix)


def to_symmetric(matrix: torch.Tensor, *, bits: int, columns: int) -> torch.Tensor:
    """Round to integers around zero with a bfloat16 scale for ``columns`` of a row, as compressed-tensors does."""
    parts = blocks(matrix, 1, columns)
    half = 1 << (bits - 1)
    scale = (parts.abs().amax((1, 3), keepdim=True).clamp(min=SMALLEST) / (half - 0.5)).bfloat16().float()
    return _joined((parts / scale).round().clamp(-half, half - 1) * scale, matrix)


def to_asymmetric(matrix: torch.Tensor, *, bits: int, columns: int) -> torch.Tensor:
    """Round to integers with a float16 scale and an integer zero for ``columns`` of a row, as in AWQ and GPTQ files."""
    parts = blocks(matrix, 1, columns)
    most = (1 << bits) - 1
    least = parts.amin((1, 3), keepdim=True).clamp(max=0)
    largest = parts.amax((1, 3), keepdim=True).clamp(min=0)
    scale = ((largest - least) / most).half().float().clamp(min=2**-24)
    zero = (-least / scale).round()
    return _joined(((parts / scale).round().add(zero).clamp(0, most) - zero) * scale, matrix)


def to_gguf(matrix: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Round to a type of GGUF files, with the library ``gguf``. Rows are padded with zeros to whole blocks."""
    number = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[number]
    padded = F.pad(matrix, (0, -matrix.shape[1] % block)).cpu().numpy()
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(gguf.quants.quantize(padded, number), number)
    return torch.from_numpy(values)[:, : matrix.shape[1]].to(matrix.device)


FP8_ROWS = partial(to_fp8, rows=1, columns=WHOLE)
INT8_ROWS = partial(to_symmetric, bits=8, columns=WHOLE)
FP8_BLOCKS = partial(to_fp8, rows=128, columns=128)
FORMATS = {
    "fp8_tensor": Format(partial(to_fp8, rows=WHOLE, columns=WHOLE)),
    "fp8_row": Format(FP8_ROWS),
    "fp8_row_inputs": Format(FP8_ROWS, FP8_ROWS),
    "fp8_block": Format(FP8_BLOCKS),
    "fp8_block_inputs": Format(FP8_BLOCKS, partial(to_fp8, rows=1, columns=128)),
    "int8_row": Format(INT8_ROWS),
    "w8a8": Format(INT8_ROWS, INT8_ROWS),
    **{
        f"int4_{columns}{suffix}": Format(partial(to, bits=4, columns=columns))
        for columns in (32, 64, 128)
        for suffix, to in (("", to_symmetric), ("_zeros", to_asymmetric))
    },
    **{kind.lower(): Format(partial(to_gguf, kind=kind)) for kind in ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
}


@torch.no_grad()
def apply(rounded: Format, model: DecoderModel) -> None:
    """Round the weights of the layers of ``model``, in float32, and from now on the inputs of their products.

    The embedding, the head, routers, norms and biases do not change, nor do the inputs of experts.
    """
    for matrix in _matrices(model):
        matrix.copy_(rounded.weights(matrix.contiguous()))
    if rounded.inputs is None:
        return
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(partial(_round_inputs, rounded.inputs))


def _round_inputs(rounding: Rounding, module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
    x, *others = given
    return rounding(x), *others


def _matrices(model: DecoderModel) -> Iterator[torch.Tensor]:
    """Yield views of the matrices of the layers, ``[outputs, inputs]``. Parts of a fused projection are separate."""
    for module in model.layers.modules():
        if isinstance(module, Linear):
            yield from module.matrix.t().split(module.outputs)
        if isinstance(module, Experts):
            for expert in module.gate_up:
                yield from expert.chunk(2)
            yield from module.down_matrix
