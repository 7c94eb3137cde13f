"""Linear layers with weights in bfloat16 and activations in float32. Only for CPUs."""

from collections.abc import Sequence

import torch
from torch import nn

from services.worker.described.memory import INTEGER_PANEL as COLUMNS


class PairedLinear(nn.Module):
    """Linear layer from ``[rows, inputs]`` to ``[rows, sum(outputs)]``, with a weight in bfloat16.

    The product rounds its input to bfloat16, and sums in float32. ``weight`` is stored in panels of 64 outputs. A row
    of a panel has two values of each output, those of inputs ``2 * i`` and ``2 * i + 1``, as instructions for bfloat16
    read them. Outputs are padded with zeros to whole panels.
    """

    quantizes, narrows = 0, False
    weight: torch.Tensor  # [panels, inputs / 2, 64, 2] bfloat16

    def __init__(self, inputs: int, outputs: int | Sequence[int], bias: bool = False) -> None:
        """Create a layer of zeros. ``inputs`` is even, and ``outputs`` is as in ``Linear``."""
        super().__init__()
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        self.inputs, self.width = inputs, sum(self.outputs)
        shape = -(-self.width // COLUMNS), inputs // 2, COLUMNS, 2
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.empty(self.width), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it."""
        product: torch.Tensor = torch.ops.tokasaurus.paired_product(x, self.weight, self.width)
        if self.bias is not None:
            product += self.bias
        return product if onto is None else onto.add_(product)

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of ``outputs [n]`` int64, ``[n, inputs]`` bfloat16."""
        return self.weight.permute(0, 2, 1, 3)[outputs // COLUMNS, outputs % COLUMNS].flatten(1)

    def targets(self, *names: str) -> "dict[str, torch.Tensor | PairedRows]":
        """Return load targets by checkpoint name. ``names`` are the prefixes of the parts."""
        targets: dict[str, torch.Tensor | PairedRows] = {}
        start = 0
        for name, size in zip(names, self.outputs, strict=True):
            targets[f"{name}.weight"] = PairedRows(self, start, size)
            start += size
        if self.bias is not None:
            targets |= zip((f"{name}.bias" for name in names), self.bias.split(self.outputs), strict=True)
        return targets


class PairedRows:
    """Load target for the outputs ``start`` to ``start + size`` of ``linear``."""

    def __init__(self, linear: PairedLinear, start: int, size: int) -> None:
        self._linear, self._start = linear, start
        self.shape, self.device = torch.Size((size, linear.inputs)), linear.weight.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Round and store ``tensor [outputs, inputs]`` of any dtype and device."""
        outputs = torch.arange(self._start, self._start + len(tensor))
        pairs = tensor.to(self.device, torch.bfloat16).unflatten(1, (-1, 2))
        self._linear.weight.permute(0, 2, 1, 3)[outputs // COLUMNS, outputs % COLUMNS] = pairs

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first values to ``rows [rows, inputs]`` float32."""
        rows.copy_(self._linear.columns(torch.arange(self._start, self._start + len(rows))))
