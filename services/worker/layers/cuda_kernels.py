"""Operators between matrix products on CUDA."""

import torch

from services.worker.described.layer import Activation, RouterConfig
from services.worker.layers import (  # noqa: F401 (registers the operators)
    triton_block_fp8,
    triton_experts,
    triton_routing,
    triton_rows,
)
from services.worker.layers.experts import ExpertWeights, Routes
from services.worker.layers.fp8 import Quantized
from services.worker.layers.kernels import TorchKernels


class CudaKernels(TorchKernels):
    """Operators for CUDA. Each except ``mix`` launches one kernel, even without torch.compile."""

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        if delta is None and (x.dim() != 2 or not x.is_contiguous()):
            return super().norm(x, weight, eps)
        contiguous = None if delta is None else delta.contiguous()
        normed: torch.Tensor = torch.ops.tokasaurus.norm(x, contiguous, weight, eps)
        return normed

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        gated: torch.Tensor = torch.ops.tokasaurus.gate(gate_up, activation)
        return gated

    def gate_quantized(
        self, gate_up: torch.Tensor, activation: Activation = "silu", block: int | None = None
    ) -> Quantized:
        return Quantized(*torch.ops.tokasaurus.gate_quantized(gate_up, activation, block))

    def norm_quantized(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, block: int | None = None
    ) -> Quantized:
        return Quantized(*torch.ops.tokasaurus.norm_quantized(x, delta, weight, eps, block))

    def quantize(self, x: torch.Tensor, block: int | None = None) -> Quantized:
        return Quantized(*torch.ops.tokasaurus.quantize(x, block))

    def route(
        self,
        logits: torch.Tensor,
        router: RouterConfig,
        chosen: int,
        correction: torch.Tensor | None,
        load: torch.Tensor | None = None,
    ) -> Routes:
        rules = router.scores, router.normalized, router.groups, router.chosen_groups, router.scale
        return Routes(*torch.ops.tokasaurus.route(logits, correction, load, *rules, chosen))

    def mix(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        activation: Activation,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        arguments = x.contiguous(), *routes, *weights, activation
        if onto is not None:
            torch.ops.tokasaurus.add_experts(onto, *arguments)
            return onto
        mixed: torch.Tensor = torch.ops.tokasaurus.mix_experts(*arguments)
        return mixed
