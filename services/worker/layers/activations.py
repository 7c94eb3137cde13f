"""Activations of MLPs in plain torch, for all devices."""

import torch
import torch.nn.functional as F

from services.worker.described.layer import Activation

# Constants of ``clamped_swiglu``, those of gpt-oss.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of ``x``, of any shape. ``clamped_swiglu`` has no meaning without ``up``."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    if activation == "relu_squared":
        return F.relu(x).square()
    return F.silu(x)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return ``activation(gate) * up``, ``[rows, size]``, for ``gate_up [rows, 2 * size]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
    return activate(gate, activation) * up
