"""The Muon optimizer for matrices and stacks of matrices of equal shape."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Of the Newton-Schulz iteration, from Keller Jordan's Muon.
ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices, roughly, in bfloat16: [..., rows, columns] -> the same shape."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class StackedMuon(torch.optim.Optimizer):
    """Muon with the update's size of AdamW, as in `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`.

    A parameter is a matrix, or a stack of matrices [count, rows, columns]. Each matrix of a stack has an update
    of its own, which is computed together with the others: 16 experts cost the launches of one.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. A closure is not supported."""
        if closure is not None:
            raise ValueError("StackedMuon.step takes no closure: compute the gradients first")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, float]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, moving = parameter.grad, state["momentum"]
        moving.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalize(gradient.lerp(moving, group["momentum"]))
        size = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * size)
