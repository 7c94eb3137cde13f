"""Linear layers. Projections of the same input are stored as one matrix."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from services.worker.described.forms import OfLayer
from services.worker.layers.block_fp8 import BlockFp8Linear
from services.worker.layers.fp8 import Fp8Linear
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.operators import operator
from services.worker.layers.panels import PanelLinear
from services.worker.layers.parts import part_targets


@operator("add_product(Tensor(a!) total, Tensor x, Tensor matrix) -> ()", lambda total, x, matrix: None)
def _add_product(total: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
    """Add ``x @ matrix`` to ``total`` in place, rounded once.

    This is a custom operator, because torch.compile would otherwise separate the sum from the product, or add to a copy
    of ``total``.
    """
    total.addmm_(x, matrix)


class Linear(nn.Module):
    """Linear layer from ``[rows, inputs]`` to ``[rows, sum(outputs)]``. Each part is one tensor in a checkpoint.

    ``weight`` is ``[inputs, sum(outputs)]``, the transpose of a checkpoint's tensors. On CPUs, products with few rows
    then take 20 to 50 % less time, and products with many rows take no more. With ``transposed`` it is
    ``[sum(outputs), inputs]``.
    """

    quantizes = 0  # inputs that share a scale in ``Quantized`` rows; 0 = the layer takes rows that are not quantized
    narrows = False  # true for layers that store fewer bits than the model's dtype has

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
        """View of the weight, ``[inputs, sum(outputs)]``."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it."""
        if onto is None:
            return x @ self.matrix if self.bias is None else torch.addmm(self.bias, x, self.matrix)
        torch.ops.tokasaurus.add_product(onto, x, self.matrix)
        return onto if self.bias is None else onto.add_(self.bias)

    def targets(self, *names: str) -> dict[str, torch.Tensor]:
        """Return views of the parts as load targets, by checkpoint name. ``names`` are the prefixes of the parts."""
        if self.transposed:
            parts = self.weight.split(self.outputs)
        else:
            parts = [part.t() for part in self.weight.split(self.outputs, dim=1)]
        return part_targets(names, parts, self.bias, self.outputs)


AnyLinear = Linear | Fp8Linear | BlockFp8Linear | GroupedLinear | IntegerLinear | PanelLinear
# Creates a linear layer from (inputs, outputs, bias).
LinearMaker = Callable[[int, int | Sequence[int], bool], AnyLinear]


LayerLinears = OfLayer[LinearMaker]
