"""Linear layers in 8-bit floating point, with one scale per row of the input and per row of the weight.

``block_fp8`` has linear layers with a scale for each block of the weight.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from services.common.errors import InvalidRequest
from services.common.model.quantized.scheme import ALL, Scheme
from services.worker.described.config import ModelConfig
from services.worker.described.refusals import refuse_fp8_products, refuse_unquantizable_sizes
from services.worker.layers.parts import part_targets
from services.worker.layers.quantized_weight import QuantizedWeight, keeps

FP8 = torch.float8_e4m3fn
_BITS = 8
LARGEST = torch.finfo(FP8).max  # 448
# A row with smaller values counts as zeros, so that its scale is not zero.
SMALLEST = 1e-12


class Quantized(NamedTuple):
    """Rows in fp8 with a scale each, or a scale for each block of columns.

    The product of rows and scales approximates the original rows.
    """

    rows: torch.Tensor  # [rows, size] fp8
    scale: torch.Tensor  # [rows, 1 or blocks] float32; with several blocks, the scales of a block are contiguous


def quantize_rows(x: torch.Tensor, block: int | None = None) -> Quantized:
    """Quantize ``x [rows, size]`` to fp8, with one scale for each row.

    With ``block``, there is a scale for each row and ``block`` columns, and the last block may be smaller. Values that
    share a scale with a value that is not finite become NaN.

    Plain operators are used, so that torch.compile can fuse them with the operator that computes ``x``.
    """
    size = x.shape[1]
    if block is None or size <= block:
        return Quantized(*_quantized(x.float()))
    padded = F.pad(x.float(), (0, -size % block)).unflatten(1, (-1, block))
    values, scale = _quantized(padded)
    return Quantized(values.flatten(1)[:, :size].contiguous(), scale.squeeze(2).t().contiguous().t())


def _quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 values and the scales of the last dimension, ``[.., 1]``."""
    # No clamp is needed: the largest value exceeds 448 by a rounding error at most, and fp8 rounds it to 448.
    largest = values.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return (values * (LARGEST / largest)).to(FP8), largest / LARGEST


def scaled_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``x @ weight.T`` for fp8 ``x [rows, inputs]`` and ``weight [outputs, inputs]``, ``[rows, outputs]``.

    ``x_scale [rows, 1]`` and ``weight_scale [1, outputs]`` are float32. ``dtype`` is that of the result, on CUDA
    bfloat16. Other devices compute in float32, as a reference.
    """
    if x.device.type == "cuda":
        return torch._scaled_mm(
            x, weight.t(), scale_a=x_scale, scale_b=weight_scale, bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    product = (x.float() @ weight.float().t()) * x_scale * weight_scale
    return (product if bias is None else product + bias).to(dtype)


class Fp8Linear(nn.Module):
    """Linear layer in fp8. Weight and scale are buffers, so the model's default dtype does not apply to them."""

    narrows = True
    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[int],
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Create an uninitialised layer with results of ``dtype``. ``outputs`` is as in ``Linear``."""
        super().__init__()
        self.dtype = dtype
        self.quantizes = inputs  # as in ``Linear``
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        width = sum(self.outputs)
        self.register_buffer("weight", torch.empty(width, inputs, dtype=FP8))
        self.register_buffer("scale", torch.empty(1, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def forward(self, x: Quantized, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it."""
        product = scaled_product(x.rows, x.scale, self.weight, self.scale, self.bias, self.dtype)
        return product if onto is None else onto.add_(product)

    def targets(self, *names: str) -> "dict[str, torch.Tensor | QuantizedRows]":
        """Return load targets that quantize, by checkpoint name. ``names`` are the prefixes of the parts."""
        weights, scales = self.weight.split(self.outputs), self.scale.split(self.outputs, dim=1)
        return part_targets(names, map(QuantizedRows, weights, scales), self.bias, self.outputs)


class QuantizedRows:
    """Load target for rows of an ``Fp8Linear``. It quantizes each tensor as it is loaded."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight, self._scale = weight, scale
        self.shape, self.device = weight.shape, weight.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Quantize and store ``tensor [outputs, inputs]`` of any dtype and device."""
        rows, scale = quantize_rows(tensor.to(self.device))
        self._weight.copy_(rows)
        self._scale.copy_(scale.t())

    def keeps(self, scheme: Scheme) -> bool:
        """Return whether ``copy_quantized`` takes weights of ``scheme``."""
        block = scheme.block or (1, ALL)
        return scheme.kind == "float" and scheme.bits == _BITS and block[0] in (ALL, 1) and block[1] == ALL

    def check_quantized(self, weight: QuantizedWeight) -> None:
        """Raise ``ValueError`` if ``copy_quantized`` would refuse ``weight``."""
        codes, scales = weight.codes, weight.scales
        if codes.dtype != FP8 or codes.shape != self.shape or tuple(scales.shape) not in ((1, 1), (len(codes), 1)):
            raise ValueError(
                f"codes {list(codes.shape)} {codes.dtype} with scales {list(scales.shape)}: expected"
                f" {list(self.shape)} {FP8} with a scale per tensor or per row; dequantize the weight first"
            )

    def copy_quantized(self, weight: QuantizedWeight) -> None:
        """Store the values of ``weight [outputs, inputs]``, in fp8 with a scale for all rows or for each row.

        A scale of the whole tensor is stored for each row. Raises ``ValueError`` for other weights.
        """
        self.check_quantized(weight)
        self._weight.copy_(weight.codes)
        self._scale.copy_(weight.scales.t().expand_as(self._scale))

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first values, multiplied by their scales, to ``rows [rows, inputs]`` float32."""
        rows.copy_(self._weight[: len(rows)].float() * self._scale.t()[: len(rows)])


class MultiTarget:
    """Load target that copies a tensor into several targets."""

    shape: torch.Size
    device: torch.device

    def __init__(self, *targets: Any) -> None:
        self._targets = targets
        self.shape, self.device = targets[0].shape, targets[0].device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` into all targets."""
        for target in self._targets:
            target.copy_(tensor)

    def keeps(self, scheme: Scheme) -> bool:
        """Return whether a target takes weights of ``scheme`` with ``copy_quantized``."""
        return any(keeps(target, scheme) for target in self._targets)

    def check_quantized(self, weight: QuantizedWeight) -> None:
        """Raise ``ValueError`` if ``copy_quantized`` would refuse ``weight``."""
        for target in self._targets:
            if keeps(target, weight.scheme):
                target.check_quantized(weight)

    def copy_quantized(self, weight: QuantizedWeight) -> None:
        """Store ``weight`` unchanged where a target keeps it, and its values elsewhere. Raises ``ValueError``."""
        for target in self._targets:
            if keeps(target, weight.scheme):
                target.copy_quantized(weight)
            else:
                target.copy_(weight.dequantized())

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first rows of the first target to ``rows``, float32."""
        copy_rows(self._targets[0], rows)


def copy_rows(target: Any, rows: torch.Tensor) -> None:
    """Copy the first rows of a load target to ``rows``, float32 on any device.

    ``rows`` has the shape of the target, except for the number of rows. Values that other ranks hold are not written.
    """
    if isinstance(target, torch.Tensor):
        rows.copy_(target[: len(rows)])
    else:
        target.copy_to(rows)


def refuse_unquantizable(config: ModelConfig, dtype: torch.dtype, device: torch.device, tp_size: int = 1) -> None:
    """Raise ``InvalidRequest`` if the model, dtype or device does not support ``quantization=fp8``.

    ``config`` describes the share of each of ``tp_size`` ranks.
    """
    refuse_unquantizable_sizes(config, tp_size)
    if device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        raise InvalidRequest(
            f"flag quantization=fp8: fp8 products return bfloat16, but dtype is {str(dtype).removeprefix('torch.')};"
            " use dtype=bfloat16 or quantization=none",
            field="quantization",
        )
    refuse_fp8_products(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
