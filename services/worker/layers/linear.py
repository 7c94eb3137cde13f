"""Linear projections; several that read the same input are one matrix."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from services.worker.layers.fp8 import Fp8Linear

_library = torch.library.Library("tokasaurus", "FRAGMENT")
_library.define("add_product(Tensor(a!) total, Tensor x, Tensor matrix) -> ()")


@torch.library.impl(_library, "add_product", "CompositeExplicitAutograd")
def _add_product(total: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
    """``total += x @ matrix``, rounded once. An operator of its own: left to itself torch.compile would take the sum
    out of the product again, or give it a copy of ``total`` to add to."""
    total.addmm_(x, matrix)


@torch.library.register_fake("tokasaurus::add_product", lib=_library)
def _(total: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
    return None


class Linear(nn.Module):
    """``[rows, inputs] -> [rows, sum(outputs)]``, the parts side by side; in a checkpoint each is a tensor of its own.

    ``weight`` is ``[inputs, outputs]``, the other way round than in a checkpoint: on CPUs products with few rows take
    a fifth to a half less time so, and those with many no more. With ``transposed`` it is ``[outputs, inputs]``.
    """

    quantizes = False  # takes rows as they are, not quantised

    def __init__(
        self, inputs: int, outputs: int | Sequence[int], bias: bool = False, *, transposed: bool = False
    ) -> None:
        super().__init__()
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        self.transposed = transposed
        shape = (sum(self.outputs), inputs) if transposed else (inputs, sum(self.outputs))
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.outputs)), requires_grad=False) if bias else None

    @property
    def matrix(self) -> torch.Tensor:
        """``[inputs, sum(outputs)]``."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """``onto [rows, sum(outputs)]``: where to add the result, in place; it is returned then."""
        if onto is None:
            return x @ self.matrix if self.bias is None else torch.addmm(self.bias, x, self.matrix)
        torch.ops.tokasaurus.add_product(onto, x, self.matrix)
        return onto if self.bias is None else onto.add_(self.bias)

    def targets(self, *names: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> view, for the checkpoint's prefix of each part."""
        if self.transposed:
            parts = self.weight.split(self.outputs)
        else:
            parts = [part.t() for part in self.weight.split(self.outputs, dim=1)]
        found = dict(zip((f"{name}.weight" for name in names), parts, strict=True))
        if self.bias is not None:
            found |= zip((f"{name}.bias" for name in names), self.bias.split(self.outputs), strict=True)
        return found


AnyLinear = Linear | Fp8Linear
# (inputs, outputs, bias) -> the module: what a model is built with.
LinearMaker = Callable[[int, int | Sequence[int], bool], AnyLinear]
