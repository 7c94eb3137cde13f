"""The gated MLP."""

import torch
from torch import nn

from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import Linear


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, kernels: LayerKernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up = Linear(hidden_size, (intermediate_size, intermediate_size), bias)
        self.down = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.gate(self.gate_up(x)))

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> view."""
        return self.gate_up.targets(f"{prefix}.gate_proj", f"{prefix}.up_proj") | self.down.targets(
            f"{prefix}.down_proj"
        )
