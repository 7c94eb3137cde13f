"""Interface of the operators between a layer's matrix products, and an implementation in torch."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from services.worker.described.layer import Activation, RouterConfig
from services.worker.layers import experts
from services.worker.layers.activations import gated
from services.worker.layers.experts import ExpertWeights, Routes
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
    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        """Return ``activation(gate) * up``, ``[tokens, size]``, for ``gate_up [tokens, 2 * size]``."""

    @abstractmethod
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``x [tokens, heads, head_dim]`` by ``cos`` and ``sin [tokens, 1, head_dim]`` from ``Rotary``."""

    def project(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return ``hidden [rows, hidden_size]`` times the rows of ``embedding``, ``[rows, vocabulary rows]``."""
        return F.linear(hidden, embedding)

    def gate_quantized(
        self, gate_up: torch.Tensor, activation: Activation = "silu", block: int | None = None
    ) -> Quantized:
        """Return ``gate(gate_up, activation)``, quantized as by ``quantize``."""
        return self.quantize(self.gate(gate_up, activation), block)

    def norm_quantized(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, block: int | None = None
    ) -> Quantized:
        """Return ``norm``, quantized as by ``quantize``."""
        return self.quantize(self.norm(x, weight, eps, delta), block)

    def quantize(self, x: torch.Tensor, block: int | None = None) -> Quantized:
        """Quantize ``x [tokens, size]`` for an fp8 product, with a scale for each token and ``block`` columns.

        With None, or if there are no more columns, a token has one scale.
        """
        return quantize_rows(x, block)

    def route(
        self,
        logits: torch.Tensor,
        router: RouterConfig,
        chosen: int,
        correction: torch.Tensor | None,
        load: torch.Tensor | None = None,
    ) -> Routes:
        """Return the experts of each token; see ``layers.experts.route``.

        If ``load [experts]`` int64 is given, add the number of tokens of each expert to it.
        """
        routes = experts.route(logits, router, chosen, correction)
        if load is not None:
            chosen_experts = routes.experts.flatten().long()
            # Threads that compute shards of a batch at once may lose counts, which are for metrics only.
            load.index_add_(0, chosen_experts, torch.ones_like(chosen_experts))
        return routes

    def mix(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        activation: Activation,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts; see ``layers.experts.mix``.

        If contiguous ``onto [tokens, hidden_size]`` is given, add to it in place and return it.
        """
        mixed = experts.mix(x, routes, weights, activation)
        return mixed if onto is None else onto.add_(mixed)


class TorchKernels(LayerKernels):
    """Reference implementation for any device and dtype. torch.compile can fuse it."""

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        if delta is not None:
            x += delta
        return F.rms_norm(x, weight.shape, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        return gated(gate_up, activation)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * cos, swapped, sin)
