"""Linear layers with weights in panels of 64 outputs, and activations in float32. Only for CPUs."""

from collections.abc import Sequence

import torch
from torch import nn

from services.worker.described.memory import PANEL_COLUMNS as COLUMNS
from services.worker.layers.parts import part_targets, spans

# Values of an output that are side by side in a panel, by the dtype of the weight.
TOGETHER = {torch.float32: 1, torch.bfloat16: 2}


class PanelLinear(nn.Module):
    """Linear layer from ``[rows, inputs]`` to ``[rows, sum(outputs)]``, with a weight in float32 or bfloat16.

    ``weight`` is stored in panels of 64 outputs, so that a product for few rows reads memory in one sequence. A row of
    a panel has the values of one input. In bfloat16 it has those of inputs ``2 * i`` and ``2 * i + 1`` of each output
    side by side, as instructions for bfloat16 read them. The product then rounds its input to bfloat16. Sums are in
    float32. Outputs are padded with zeros to whole panels.
    """

    quantizes, narrows = 0, False
    weight: torch.Tensor  # [panels, inputs, 64, 1] float32, or [panels, inputs / 2, 64, 2] bfloat16

    def __init__(
        self, inputs: int, outputs: int | Sequence[int], bias: bool = False, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """Create a layer of zeros. ``outputs`` is as in ``Linear``. In bfloat16, ``inputs`` is even."""
        super().__init__()
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        self.inputs, self.width = inputs, sum(self.outputs)
        together = TOGETHER[dtype]
        shape = -(-self.width // COLUMNS), inputs // together, COLUMNS, together
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.width), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it."""
        product: torch.Tensor = torch.ops.tokasaurus.panel_product(x, self.weight, self.width)
        if self.bias is not None:
            product += self.bias
        return product if onto is None else onto.add_(product)

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of ``outputs [n]`` int64, ``[n, inputs]`` in the dtype of the weight."""
        return self.weight.permute(0, 2, 1, 3)[outputs // COLUMNS, outputs % COLUMNS].flatten(1)

    def targets(self, *names: str) -> "dict[str, torch.Tensor | PanelRows]":
        """Return load targets by checkpoint name. ``names`` are the prefixes of the parts."""
        parts = (PanelRows(self, start, size) for start, size in spans(self.outputs))
        return part_targets(names, parts, self.bias, self.outputs)


class PanelRows:
    """Load target for the outputs ``start`` to ``start + size`` of ``linear``."""

    def __init__(self, linear: PanelLinear, start: int, size: int) -> None:
        self._linear, self._start = linear, start
        self.shape, self.device = torch.Size((size, linear.inputs)), linear.weight.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Round and store ``tensor [outputs, inputs]`` of any dtype and device."""
        weight, outputs = self._linear.weight, torch.arange(self._start, self._start + len(tensor))
        values = tensor.to(self.device, weight.dtype).unflatten(1, (-1, weight.shape[3]))
        weight.permute(0, 2, 1, 3)[outputs // COLUMNS, outputs % COLUMNS] = values

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first values to ``rows [rows, inputs]`` float32."""
        rows.copy_(self._linear.columns(torch.arange(self._start, self._start + len(rows))))
