"""The small operators between a layer's matrix products, behind one interface."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from services.worker.layers.fp8 import Quantized, quantize_rows


class LayerKernels(ABC):
    """Stateless; any thread. ``tokens`` is the number of rows everywhere."""

    @abstractmethod
    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight`` over the last dimension of ``x [tokens, .., size]``, contiguous or not."""

    @abstractmethod
    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x += delta`` in place, both ``[tokens, size]``, then ``norm`` of it."""

    @abstractmethod
    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``gate_up [tokens, 2 * size]``: ``[tokens, size]``."""

    @abstractmethod
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x [tokens, heads, head_dim]`` turned by ``cos`` and ``sin [tokens, 1, head_dim]`` as of ``Rotary``."""

    def gate_quantized(self, gate_up: torch.Tensor) -> Quantized:
        """``gate``, for a product that takes quantised rows."""
        return self.quantize(self.gate(gate_up))

    def norm_quantized(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Quantized:
        """``norm``, or ``add_norm`` where there is a ``delta``, for a product that takes quantised rows."""
        normed = self.norm(x, weight, eps) if delta is None else self.add_norm(x, delta, weight, eps)
        return self.quantize(normed)

    def quantize(self, x: torch.Tensor) -> Quantized:
        """``x [tokens, size]`` for a product that takes quantised rows."""
        return quantize_rows(x)


class TorchKernels(LayerKernels):
    """On any device, for any dtype, and for torch.compile to fuse: the reference for the other."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x += delta
        return self.norm(x, weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * cos, swapped, sin)
