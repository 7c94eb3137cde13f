"""The dense MLP of a layer."""

from typing import Any

import torch
from torch import nn

from services.worker.described.layer import MlpConfig
from services.worker.layers.activations import activate
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import LayerLinears
from services.worker.parallel.exchange import Exchange


class Mlp(nn.Module):
    """Gated MLP, ``down(activation(gate(x)) * up(x))``, or plain one, ``down(activation(up(x)))``.

    Gate and up are one matrix. The caller applies ``down``.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        features: MlpConfig,
        kernels: LayerKernels,
        linears: LayerLinears,
        *,
        adds_bias: bool = True,
    ) -> None:
        """Create uninitialised weights for ``width`` inner columns, this rank's share.

        If ``adds_bias`` is false, ``down`` has no bias, because another rank adds it.
        """
        super().__init__()
        self.kernels, self.features = kernels, features
        bias, inner = features.mlp_bias, (width, width) if features.kind == "gated" else width
        self.inner = linears.inner(hidden_size, inner, bias)
        self.down = linears.down(width, hidden_size, bias and adds_bias)
        self.quantizes = self.inner.quantizes  # as in ``Linear``

    def forward(self, x: torch.Tensor | Quantized, exchange: Exchange, tokens: int) -> torch.Tensor | Quantized:
        """Return the input of ``down``, ``[tokens, width]``.

        ``x [rows, hidden_size]`` are this rank's rows, quantized if the layers are.
        """
        return self.activated(exchange.column(x, self.inner, tokens))

    def activated(self, inner: torch.Tensor) -> torch.Tensor | Quantized:
        """Return the input of ``down`` for the result of the first product."""
        activation = self.features.activation
        if self.features.kind == "plain":
            active = activate(inner, activation)
            return self.kernels.quantize(active, self.down.quantizes) if self.down.quantizes else active
        if self.down.quantizes:
            return self.kernels.gate_quantized(inner, activation, self.down.quantizes)
        return self.kernels.gate(inner, activation)

    def targets(self, prefix: str) -> dict[str, Any]:
        """Return the load targets of the weights, by the model's names."""
        names = ("gate_proj", "up_proj") if self.features.kind == "gated" else ("up_proj",)
        inner = self.inner.targets(*(f"{prefix}.{name}" for name in names))
        return {**inner, **self.down.targets(f"{prefix}.down_proj")}
