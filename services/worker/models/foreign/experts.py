"""The experts function of transformers' layers."""

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "tokasaurus"  # of the experts function, in ``config._experts_implementation``


def mix(module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts, ``[tokens, hidden_size]``.

    ``hidden [tokens, hidden_size]``; ``chosen`` and ``weights [tokens, experts per token]``.
    """
    mixed: torch.Tensor = grouped_mm_experts_forward(module, hidden, chosen, weights)
    return mixed


def register() -> None:
    """Add the experts function to those of transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, mix)
