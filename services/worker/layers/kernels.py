"""Interface of the operators between a layer's matrix products, and an implementation in torch."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from services.worker.layers.fp8 import Quantized, quantize_rows


class LayerKernels(ABC):
    """Operators between matrix products. They have no state, and any thread may use them."""

    @abstractmethod
    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension of ``x [tokens, .., size]``, contiguous or not.

        If ``delta`` is given, both are ``[tokens, size]``, and ``delta`` is first added to ``x`` in place.
        """

    @abstractmethod
    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate) * up``, ``[tokens, size]``, for ``gate_up [tokens, 2 * size]``."""

    @abstractmethod
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``x [tokens, heads, head_dim]`` by ``cos`` and ``sin [tokens, 1, head_dim]`` from ``Rotary``."""

    def gate_quantized(self, gate_up: torch.Tensor) -> Quantized:
        """Return ``gate(gate_up)``, quantized."""
        return self.quantize(self.gate(gate_up))

    def norm_quantized(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Quantized:
        """Return ``norm``, quantized."""
        return self.quantize(self.norm(x, weight, eps, delta))

    def quantize(self, x: torch.Tensor) -> Quantized:
        """Quantize ``x [tokens, size]`` for an fp8 product."""
        return quantize_rows(x)


class TorchKernels(LayerKernels):
    """Reference implementation for any device and dtype. torch.compile can fuse it."""

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        if delta is not None:
            x += delta
        return F.rms_norm(x, weight.shape, weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * cos, swapped, sin)
