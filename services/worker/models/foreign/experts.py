"""The experts function of transformers' layers, which runs the worker's operator."""

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward

from services.worker.described.layer import Activation
from services.worker.layers.experts import ExpertWeights, Routes
from services.worker.layers.kernels import LayerKernels

NAME = "tokasaurus"  # of the experts function, in ``config._experts_implementation``
# Attribute of a module of experts that the worker's operator computes: its ``LayerKernels`` and its activation.
OPERATOR = "tokasaurus_operator"
_ACTIVATIONS: dict[str, Activation] = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}


def mix(module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts, ``[tokens, hidden_size]``.

    ``hidden [tokens, hidden_size]``; ``chosen`` and ``weights [tokens, experts per token]``. Experts of another kind
    than the worker's are computed by an operator of transformers.
    """
    operator: tuple[LayerKernels, Activation] | None = getattr(module, OPERATOR, None)
    if operator is None:
        mixed: torch.Tensor = grouped_mm_experts_forward(module, hidden, chosen, weights)
        return mixed
    kernels, activation = operator
    routes = Routes(chosen.int().contiguous(), weights.float().contiguous())
    return kernels.mix(hidden, routes, ExpertWeights(*matrices_of(module), None, None), activation)


def matrices_of(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of a module of experts: ``gate_up`` and ``down`` of ``ExpertWeights``."""
    return module.gate_up_proj, module.down_proj


def activation_of(module: Any) -> Activation | None:
    """Return the activation of a module of experts that the worker's operator computes, or None for other modules."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "gate_up_proj"):
        return None
    plain = (
        module.has_gate
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias or module.has_post_expert_norm)
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
    )
    return _ACTIVATIONS.get(type(module.act_fn).__name__) if plain else None


def register() -> None:
    """Add the experts function to those of transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, mix)
