"""The gated MLP."""

import torch
from torch import nn

from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LinearMaker


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one matrix."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, kernels: LayerKernels, linear: LinearMaker
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up = linear(hidden_size, (intermediate_size, intermediate_size), bias)
        self.down = linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor | Quantized, onto: torch.Tensor | None = None) -> torch.Tensor:
        """``x [tokens, hidden_size]`` -> the same shape, added to ``onto`` in place where that is given."""
        gate_up = self.gate_up(x)
        if self.down.quantizes:
            return self.down(self.kernels.gate_quantized(gate_up), onto)
        return self.down(self.kernels.gate(gate_up), onto)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> view."""
        return self.gate_up.targets(f"{prefix}.gate_proj", f"{prefix}.up_proj") | self.down.targets(
            f"{prefix}.down_proj"
        )
