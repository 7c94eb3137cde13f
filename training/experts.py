"""A mixture of experts in plain torch, which computes every expert for every token.

The experts of the built-in model are small. All of them together are one dense feed-forward part whose columns
are weighted by the router. Training then needs no sorting and no capacity limit, and no token is dropped.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def route(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Return the experts' weights and the balance loss of router logits [tokens, experts].

    The weights, float32 [tokens, experts], are the `chosen` largest probabilities, which sum to 1, and zero for
    the other experts. The balance loss of the Switch Transformer is a scalar: 1 if each expert has an equal
    share of tokens and of probability, and at most the number of experts.
    """
    probabilities = logits.float().softmax(dim=-1)
    largest, experts = probabilities.topk(chosen, dim=-1)
    weights = torch.zeros_like(probabilities).scatter(-1, experts, largest / largest.sum(dim=-1, keepdim=True))
    shares = (weights > 0).float().mean(dim=0) / chosen
    return weights, logits.shape[-1] * (shares * probabilities.mean(dim=0)).sum()


class ExpertStack(nn.Module):
    """The matrices of all experts of a layer; each parameter has the experts as its first dimension."""

    def __init__(self, experts: int, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, width))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' results for x [tokens, hidden] and weights [tokens, experts]."""
        gate, up = F.linear(x, self.gate_proj.flatten(0, 1)), F.linear(x, self.up_proj.flatten(0, 1))
        inner = (F.silu(gate) * up).unflatten(-1, self.up_proj.shape[:2])
        weighted = (inner * weights.to(inner.dtype).unsqueeze(-1)).flatten(-2, -1)
        return F.linear(weighted, self.down_proj.transpose(0, 1).flatten(1, 2))


class RoutedExperts(nn.Module):
    """The feed-forward part of a layer of Qwen3-MoE: a router and its experts."""

    def __init__(self, hidden_size: int, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(hidden_size, experts, bias=False)
        self.experts = ExpertStack(experts, hidden_size, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result for x [batch, length, hidden], of the same shape, and the balance loss."""
        rows = x.flatten(0, 1)
        weights, balance = route(self.gate(rows), self.chosen)
        return self.experts(rows, weights).view_as(x), balance
