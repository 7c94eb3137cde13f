"""Linear projections; several that read the same input are one matrix."""

from collections.abc import Sequence

import torch
from torch import nn


class Linear(nn.Module):
    """``[rows, inputs] -> [rows, sum(outputs)]``, the parts side by side; in a checkpoint each is a tensor of its own.

    The weight is kept as ``[inputs, outputs]``, the other way round than in a checkpoint: on CPUs products with few
    rows take a fifth to a half less time so, and those with many no more.
    """

    def __init__(self, inputs: int, outputs: int | Sequence[int], bias: bool = False) -> None:
        super().__init__()
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        self.weight = nn.Parameter(torch.empty(inputs, sum(self.outputs)), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.outputs)), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def targets(self, *names: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> view, for the checkpoint's prefix of each part."""
        parts = [part.t() for part in self.weight.split(self.outputs, dim=1)]
        found = dict(zip((f"{name}.weight" for name in names), parts, strict=True))
        if self.bias is not None:
            found |= zip((f"{name}.bias" for name in names), self.bias.split(self.outputs), strict=True)
        return found
