"""Linear layers in fp8 with one scale for each block of 128 x 128 weights, as DeepSeek publishes them.

Rows of inputs have a scale for each 128 columns. Products of 128 inputs are summed in fp8 units, and then scaled and
summed in float32.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from services.common.model.quantized.scheme import Scheme
from services.worker.described.forms import FP8_BLOCK, FP8_MULTIPLE
from services.worker.layers.fp8 import FP8, LARGEST, SMALLEST, Quantized
from services.worker.layers.parts import part_targets
from services.worker.layers.quantized_weight import QuantizedWeight

BLOCK = FP8_BLOCK  # rows and columns of a block of weights, and columns of a block of inputs
_ROWS_AT_ONCE = 4096  # rows that are quantized at once, to bound the memory of copies


def blocks_of(size: int) -> int:
    """Return the number of blocks of ``size`` rows or columns. The last block may be smaller."""
    return -(-size // BLOCK)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``weight [outputs, inputs]`` of any float dtype.

    Return fp8 values of the same shape, and their scales ``[row blocks, column blocks]`` float32. A block with a value
    that is not finite becomes NaN.
    """
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=SMALLEST)
    values = (blocks * (LARGEST / largest)).to(FP8).flatten(2, 3).flatten(0, 1)
    return values[:outputs, :inputs].contiguous(), (largest / LARGEST)[:, 0, :, 0]


def expand_blocks(scale: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Return the scale of each weight, ``[outputs, inputs]``, from ``scale [row blocks, column blocks]``."""
    columns = scale.repeat_interleave(BLOCK, dim=1)[:, :inputs]
    return columns.repeat_interleave(BLOCK, dim=0)[:outputs]


def block_product(x: Quantized, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x @ weight.T`` of ``dtype``, ``[rows, outputs]``.

    ``x`` has a scale for each row and 128 columns. ``weight [outputs, inputs]`` is fp8, and ``scale [row blocks, column
    blocks]`` is float32. On CPUs the result is computed in float32, as a reference.
    """
    if x.rows.device.type != "cpu":
        product: torch.Tensor = torch.ops.tokasaurus.block_fp8_product(x.rows, x.scale, weight, scale, dtype)
        return product
    inputs = x.rows.shape[1]
    values = x.rows.float() * x.scale.repeat_interleave(BLOCK, dim=1)[:, :inputs]
    return (values @ (weight.float() * expand_blocks(scale, *weight.shape)).t()).to(dtype)


class BlockFp8Linear(nn.Module):
    """Linear layer in fp8 with scales of blocks. Weight and scale are buffers, which the default dtype does not affect.

    The rows of each part begin a block, so all parts but the last must have a multiple of 128 rows.
    """

    quantizes, narrows = BLOCK, True  # as in ``Linear``
    weight: torch.Tensor  # [sum(outputs), inputs] fp8
    scale: torch.Tensor  # [row blocks, column blocks] float32

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[int],
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Create an uninitialised layer with results of ``dtype``. ``outputs`` is as in ``Linear``.

        Raises ``ValueError`` if the sizes are not supported.
        """
        super().__init__()
        self.dtype = dtype
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        if problem := unsupported_sizes(inputs, self.outputs):
            raise ValueError(problem)
        width = sum(self.outputs)
        self.register_buffer("weight", torch.empty(width, inputs, dtype=FP8))
        self.register_buffer("scale", torch.empty(blocks_of(width), blocks_of(inputs), dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def forward(self, x: Quantized, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it."""
        product = block_product(x, self.weight, self.scale, self.dtype)
        if self.bias is not None:
            product += self.bias
        return product if onto is None else onto.add_(product)

    def targets(self, *names: str) -> "dict[str, torch.Tensor | BlockRows]":
        """Return load targets that quantize, by checkpoint name. ``names`` are the prefixes of the parts."""
        scales = self.scale.split([blocks_of(size) for size in self.outputs])
        return part_targets(names, map(BlockRows, self.weight.split(self.outputs), scales), self.bias, self.outputs)


def unsupported_sizes(inputs: int, outputs: Sequence[int]) -> str | None:
    """Return why ``BlockFp8Linear`` does not support these sizes, or None if it does."""
    if inputs % FP8_MULTIPLE:
        return (
            f"a weight with {inputs} inputs: products in fp8 need a multiple of {FP8_MULTIPLE}; dequantize the weight"
        )
    if any(size % BLOCK for size in outputs[:-1]):
        return (
            f"parts of {', '.join(map(str, outputs))} rows: with scales of {BLOCK} x {BLOCK} blocks, all parts but the"
            f" last need a multiple of {BLOCK} rows; dequantize the weights"
        )
    return None


class BlockRows:
    """Load target for rows of a ``BlockFp8Linear`` that begin a block. It quantizes each tensor as it is loaded."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight, self._scale = weight, scale
        self.shape, self.device = weight.shape, weight.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Quantize and store ``tensor [outputs, inputs]`` of any dtype and device."""
        for first in range(0, len(tensor), _ROWS_AT_ONCE):
            rows, scale = quantize_blocks(tensor[first : first + _ROWS_AT_ONCE].to(self.device))
            self._weight[first : first + len(rows)].copy_(rows)
            self._scale[first // BLOCK :][: len(scale)].copy_(scale)

    def keeps(self, scheme: Scheme) -> bool:
        """Return whether ``copy_quantized`` takes weights of ``scheme``."""
        return scheme.kind == "float" and scheme.block == (BLOCK, BLOCK)

    def check_quantized(self, weight: QuantizedWeight) -> None:
        """Raise ``ValueError`` if ``copy_quantized`` would refuse ``weight``."""
        codes, scales = weight.codes, weight.scales
        if codes.dtype != FP8 or codes.shape != self.shape or scales.shape != self._scale.shape:
            raise ValueError(
                f"codes {list(codes.shape)} {codes.dtype} with scales {list(scales.shape)}: expected"
                f" {list(self.shape)} {FP8} with scales {list(self._scale.shape)}; dequantize the weight first"
            )

    def copy_quantized(self, weight: QuantizedWeight) -> None:
        """Store the values of ``weight [outputs, inputs]``, in fp8 with scales of blocks, unchanged.

        It begins with a block, also where it is a part of a checkpoint's tensor. Raises ``ValueError`` for other
        weights.
        """
        self.check_quantized(weight)
        self._weight.copy_(weight.codes)
        self._scale.copy_(weight.scales)

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first values, multiplied by their scales, to ``rows [rows, inputs]`` float32."""
        rows.copy_(self._weight[: len(rows)].float() * expand_blocks(self._scale, *rows.shape))
