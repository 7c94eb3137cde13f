"""The gated MLP."""

from typing import Any

import torch
from torch import nn

from services.worker.described.config import ModelConfig
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LinearMaker
from services.worker.parallel.exchange import Exchange


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one matrix. ``down`` is the caller's to apply."""

    def __init__(
        self, config: ModelConfig, kernels: LayerKernels, linear: LinearMaker, *, adds_bias: bool = True
    ) -> None:
        """``config``: of what this rank has. ``adds_bias``: that of ``down``, where it has one, is added here."""
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.kernels = kernels
        self.gate_up = linear(config.hidden_size, (size, size), bias)
        self.down = linear(size, config.hidden_size, bias and adds_bias)

    def forward(self, x: torch.Tensor | Quantized, exchange: Exchange, tokens: int) -> torch.Tensor | Quantized:
        """``x [rows, hidden_size]``, this rank's rows -> ``[tokens, intermediate_size]``, for ``down``."""
        gate_up = exchange.column(x, self.gate_up, tokens)
        return self.kernels.gate_quantized(gate_up) if self.down.quantizes else self.kernels.gate(gate_up)

    def targets(self, prefix: str) -> dict[str, Any]:
        """Checkpoint name -> view."""
        gate_up = self.gate_up.targets(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return {**gate_up, **self.down.targets(f"{prefix}.down_proj")}
