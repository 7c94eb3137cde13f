"""The gated MLP."""

from typing import Any

import torch
from torch import nn

from services.worker.described.config import ModelConfig
from services.worker.described.layer import MlpConfig
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LinearMaker
from services.worker.parallel.exchange import Exchange


class Mlp(nn.Module):
    """Gated MLP, ``down(silu(gate(x)) * up(x))``, with one matrix for gate and up. The caller applies ``down``."""

    def __init__(
        self,
        config: ModelConfig,
        features: MlpConfig,
        kernels: LayerKernels,
        linear: LinearMaker,
        *,
        adds_bias: bool = True,
    ) -> None:
        """Create uninitialised weights for ``config``, this rank's share of the model, and ``features``.

        If ``adds_bias`` is false, ``down`` has no bias, because another rank adds it.
        """
        super().__init__()
        size, bias = config.intermediate_size, features.mlp_bias
        self.kernels = kernels
        self.gate_up = linear(config.hidden_size, (size, size), bias)
        self.down = linear(size, config.hidden_size, bias and adds_bias)

    def forward(self, x: torch.Tensor | Quantized, exchange: Exchange, tokens: int) -> torch.Tensor | Quantized:
        """Return the input of ``down``, ``[tokens, intermediate_size]``.

        ``x [rows, hidden_size]`` are this rank's rows.
        """
        gate_up = exchange.column(x, self.gate_up, tokens)
        return self.kernels.gate_quantized(gate_up) if self.down.quantizes else self.kernels.gate(gate_up)

    def targets(self, prefix: str) -> dict[str, Any]:
        """Return the load targets of the weights, by checkpoint name."""
        gate_up = self.gate_up.targets(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return {**gate_up, **self.down.targets(f"{prefix}.down_proj")}
