"""Linear projections in 8-bit floating point, one scale for each row of the input and of the weight."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from services.common.errors import InvalidRequest
from services.worker.described.config import ModelConfig
from services.worker.described.refusals import refuse_fp8_products, refuse_unquantizable_sizes

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
# Below this a row counts as zeros: its scale must not be, since rows are divided by it.
SMALLEST = 1e-12


class Quantized(NamedTuple):
    """About ``rows * scale``."""

    rows: torch.Tensor  # [rows, size] fp8
    scale: torch.Tensor  # [rows, 1] float32


def quantize_rows(x: torch.Tensor) -> Quantized:
    """``x [rows, size]`` as fp8 of the same shape and float32 ``[rows, 1]``, whose product is about ``x``.

    Plain operators, for torch.compile to fuse with what made ``x``. A row with anything that is not finite gives NaN.
    """
    values = x.float()
    # The largest value may come out a rounding error above 448, which rounds to 448: no clamp.
    largest = values.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return Quantized((values * (LARGEST / largest)).to(FP8), largest / LARGEST)


def scaled_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x [rows, inputs]`` fp8 times ``weight [outputs, inputs]`` fp8: ``[rows, outputs]`` of ``dtype``.

    ``x_scale [rows, 1]`` and ``weight_scale [1, outputs]`` are float32. On CUDA ``dtype`` is bfloat16; elsewhere the
    product is taken in float32, as a reference.
    """
    if x.device.type == "cuda":
        return torch._scaled_mm(
            x, weight.t(), scale_a=x_scale, scale_b=weight_scale, bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    product = (x.float() @ weight.float().t()) * x_scale * weight_scale
    return (product if bias is None else product + bias).to(dtype)


class Fp8Linear(nn.Module):
    """As ``Linear``. Weight and scale are buffers, which keep their dtypes whatever the model's is."""

    quantizes = True
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
        """``dtype``: of the result."""
        super().__init__()
        self.dtype = dtype
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        width = sum(self.outputs)
        self.register_buffer("weight", torch.empty(width, inputs, dtype=FP8))
        self.register_buffer("scale", torch.empty(1, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def forward(self, x: Quantized, onto: torch.Tensor | None = None) -> torch.Tensor:
        """``onto [rows, sum(outputs)]``: where to add the result, in place; it is returned then."""
        product = scaled_product(x.rows, x.scale, self.weight, self.scale, self.bias, self.dtype)
        return product if onto is None else onto.add_(product)

    def targets(self, *names: str) -> "dict[str, torch.Tensor | QuantizedRows]":
        """Checkpoint name -> what quantises the part that is copied into it."""
        weights, scales = self.weight.split(self.outputs), self.scale.split(self.outputs, dim=1)
        parts = [QuantizedRows(*each) for each in zip(weights, scales, strict=True)]
        found: dict[str, torch.Tensor | QuantizedRows] = dict(
            zip((f"{name}.weight" for name in names), parts, strict=True)
        )
        if self.bias is not None:
            found |= zip((f"{name}.bias" for name in names), self.bias.split(self.outputs), strict=True)
        return found


class QuantizedRows:
    """Rows of an ``Fp8Linear`` as a place to load into: only one tensor at a time exists in its own dtype."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight, self._scale = weight, scale
        self.shape, self.device = weight.shape, weight.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """``tensor [outputs, inputs]``, any dtype and device."""
        rows, scale = quantize_rows(tensor.to(self.device))
        self._weight.copy_(rows)
        self._scale.copy_(scale.t())


class Copies:
    """Several places that the same tensor is loaded into."""

    shape: torch.Size
    device: torch.device

    def __init__(self, *targets: "torch.Tensor | QuantizedRows | Copies") -> None:
        self._targets = targets
        self.shape, self.device = targets[0].shape, targets[0].device

    def copy_(self, tensor: torch.Tensor) -> None:
        for target in self._targets:
            target.copy_(tensor)


def refuse_unquantizable(config: ModelConfig, dtype: torch.dtype, device: torch.device, tp_size: int = 1) -> None:
    """Raises ``InvalidRequest`` for a model, dtype or device that ``quantization=fp8`` cannot be used with.

    ``config``: of what each of ``tp_size`` ranks has.
    """
    refuse_unquantizable_sizes(config, tp_size)
    if device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        raise InvalidRequest(
            f"flag quantization=fp8: products give bfloat16, but dtype is {str(dtype).removeprefix('torch.')};"
            " use dtype=bfloat16 or quantization=none",
            field="quantization",
        )
    refuse_fp8_products(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
