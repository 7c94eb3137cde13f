"""Weights that are integers of 8 or 4 bits, with scales for groups of 32 inputs, of linear layers. Only for CPUs.

The formats are those of GGUF's types Q8_0 and Q4_1. Integers of Q8_0, Q5_0, Q4_1 and Q4_0 files are stored unchanged.
The head has 8 bits with both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from services.common.model.quantized.scheme import Scheme
from services.worker.described.forms import integer_bits
from services.worker.described.memory import INTEGER_GROUP, PANEL_COLUMNS
from services.worker.layers.grouped import middle, packed
from services.worker.layers.parts import part_targets, spans
from services.worker.layers.quantized_weight import QuantizedWeight

# Rows that are quantized at once, so that copies stay in the caches of the processor.
_QUANTIZED_ROWS = 4 * PANEL_COLUMNS
# Steps of the search for scales of 4 bits. Further steps gain less than 3 % of the squared error each.
_SEARCH_STEPS = 4
_DTYPES = {8: torch.int8, 4: torch.uint8}
_MIDDLE = middle(4)


class Integers(NamedTuple):
    """Rows of a weight as integers. A value is ``integer * scale``, and for 4 bits ``integer * scale + offset``."""

    values: torch.Tensor  # [rows, inputs] int8, or uint8 from 0 to 15
    scales: torch.Tensor  # [rows, groups, 1 or 2] float16: the scale, and for 4 bits the offset


def to_integers(rows: torch.Tensor, bits: int) -> Integers:
    """Quantize ``rows [rows, inputs]`` of any float dtype, where ``inputs`` is a multiple of 32.

    Integers of 8 bits are from -127 to 127, and those of 4 bits from 0 to 15. With 4 bits, scale and offset are found
    by a search for the least squared error of a group, which begins with its least and largest value. A value that is
    not finite makes its group NaN or infinite.
    """
    groups = rows.float().unflatten(1, (-1, INTEGER_GROUP))
    if bits == 8:
        scale = (groups.abs().amax(dim=2, keepdim=True) / 127).half()
        values = (groups * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
        return Integers(values.flatten(1), scale)
    least = groups.amin(dim=2, keepdim=True)
    scales = torch.cat(((groups.amax(dim=2, keepdim=True) - least) / 15, least), dim=2).half()
    values = _nearest(groups, scales)
    error = _squared_error(groups, values, scales)
    for _ in range(_SEARCH_STEPS):
        found = _best_scales(groups, values)
        nearest = _nearest(groups, found)
        found_error = _squared_error(groups, nearest, found)
        better = found_error < error
        values, scales = torch.where(better, nearest, values), torch.where(better, found, scales)
        error = torch.where(better, found_error, error)
    return Integers(values.flatten(1).to(torch.uint8), scales)


def _nearest(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the integers from 0 to 15 next to ``groups [rows, groups, 32]``, float32.

    ``scales [rows, groups, 2]`` are float16, as in ``Integers``.
    """
    scale, offset = scales.split(1, dim=2)
    values: torch.Tensor = (groups - offset.float()).mul_(_inverse(scale)).round_().clamp_(0, 15)
    return values


def _best_scales(groups: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the scales and offsets that fit ``values`` to ``groups`` with the least squared error, as ``Integers``."""
    value, mean = values.mean(dim=2, keepdim=True), groups.mean(dim=2, keepdim=True)
    deviation = values - value
    # Groups in which all integers are equal get a scale of 0.
    scale = (deviation * groups).sum(2, keepdim=True) / deviation.square().sum(2, keepdim=True).clamp_(min=1e-6)
    return torch.cat((scale, mean - scale * value), dim=2).half()


def _squared_error(groups: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the sum over each group, ``[rows, groups, 1]``."""
    scale, offset = scales.float().split(1, dim=2)
    difference: torch.Tensor = (values * scale).add_(offset).sub_(groups)
    return difference.square_().sum(dim=2, keepdim=True)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return ``1 / scale`` in float32, and 0 for a scale of 0."""
    return torch.where(scale == 0, 0.0, 1 / scale.float())


class IntegerLinear(nn.Module):
    """Linear layer from ``[rows, inputs]`` to ``[rows, sum(outputs)]``, with a weight of ``bits`` 8 or 4.

    The weight is stored in panels of 64 outputs, in which the values of an input are next to each other. Outputs are
    padded with zeros to whole panels. Two inputs of 4 bits are in one byte: inputs 0 to 15 of a group are the low
    halves, and inputs 16 to 31 are the high halves.
    """

    quantizes, narrows = 0, True
    weight: torch.Tensor  # [panels, inputs, 64] int8, or [panels, inputs / 2, 64] uint8
    scale: torch.Tensor  # [panels, groups, 1 or 2, 64] float16

    def __init__(self, inputs: int, outputs: int | Sequence[int], bias: bool = False, *, bits: int) -> None:
        """Create a layer of zeros. ``inputs`` is a multiple of 32, and ``outputs`` is as in ``Linear``."""
        super().__init__()
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        self.bits, self.inputs, self.width = bits, inputs, sum(self.outputs)
        weight, scale = zero_panels(self.width, inputs, bits)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(torch.empty(self.width), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it.

        Sums are in float32.
        """
        product: torch.Tensor = torch.ops.tokasaurus.integer_product(x, self.weight, self.scale, self.width)
        if self.bias is not None:
            product += self.bias
        return product if onto is None else onto.add_(product)

    def dequantized(self) -> torch.Tensor:
        """Return the weight as the product reads it, ``[inputs, sum(outputs)]`` float32."""
        return dequantized(self.weight, self.scale, self.width)

    def targets(self, *names: str) -> "dict[str, torch.Tensor | IntegerRows]":
        """Return load targets that quantize, by checkpoint name. ``names`` are the prefixes of the parts."""
        parts = (IntegerRows(self.weight, self.scale, start, size) for start, size in spans(self.outputs))
        return part_targets(names, parts, self.bias, self.outputs)


def zero_panels(outputs: int, inputs: int, bits: int, *before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and scale of zeros, as in ``IntegerLinear``. ``before`` are the sizes of further dimensions."""
    panels, groups = -(-outputs // PANEL_COLUMNS), inputs // INTEGER_GROUP
    weight = torch.zeros(*before, panels, inputs * bits // 8, PANEL_COLUMNS, dtype=_DTYPES[bits])
    return weight, torch.zeros(*before, panels, groups, 8 // bits, PANEL_COLUMNS, dtype=torch.float16)


class IntegerRows:
    """Load target for the outputs ``start`` to ``start + size`` of a weight. ``copy_`` quantizes a tensor.

    ``weight`` and ``scale`` are as in ``IntegerLinear``.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, start: int, size: int) -> None:
        self._weight, self._scale, self._start = weight, scale, start
        self._bits = 8 // scale.shape[2]
        self.shape, self.device = torch.Size((size, scale.shape[1] * INTEGER_GROUP)), weight.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Quantize and store ``tensor [outputs, inputs]`` of any dtype and device."""
        for first in range(0, len(tensor), _QUANTIZED_ROWS):
            rows = tensor[first : first + _QUANTIZED_ROWS]
            self._store(first, to_integers(rows.to(self.device), self._bits))

    def keeps(self, scheme: Scheme) -> bool:
        """Return whether ``copy_quantized`` takes weights of ``scheme``."""
        return integer_bits(scheme) == self._bits

    def check_quantized(self, weight: QuantizedWeight) -> None:
        """Raise ``ValueError`` if an offset would exceed float16."""
        most = torch.finfo(torch.float16).max / _MIDDLE
        if self._bits == 4 and weight.offsets is None and bool((weight.scales.abs() > most).any()):
            raise ValueError(f"it has scales above {most:,.0f}, whose offsets exceed float16")

    def copy_quantized(self, weight: QuantizedWeight) -> None:
        """Store the integers and scales of ``weight [outputs, inputs]``, of a scheme that it ``keeps``, unchanged.

        Raises ``ValueError`` as ``check_quantized`` does.
        """
        self.check_quantized(weight)
        codes, scales, offsets = weight.codes, weight.scales.unsqueeze(2), weight.offsets
        if self._bits == 4 and offsets is None:
            codes, offsets = (codes + _MIDDLE).to(torch.uint8), -_MIDDLE * weight.scales
        if offsets is not None:
            scales = torch.cat((scales, offsets.unsqueeze(2)), dim=2)
        for first in range(0, len(codes), _QUANTIZED_ROWS):
            part = slice(first, first + _QUANTIZED_ROWS)
            self._store(first, Integers(codes[part], scales[part].half()))

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first values, as the product reads them, to ``rows [rows, inputs]`` float32."""
        stop = self._start + len(rows)
        first, last = self._start // PANEL_COLUMNS, -(-stop // PANEL_COLUMNS)
        skipped = first * PANEL_COLUMNS
        found = dequantized(self._weight[first:last], self._scale[first:last], stop - skipped)
        rows.copy_(found[:, self._start - skipped :].t())

    def _store(self, first: int, rows: Integers) -> None:
        """Store ``rows`` from row ``first`` on."""
        values, scales = rows
        outputs = torch.arange(self._start + first, self._start + first + len(values))
        place = outputs // PANEL_COLUMNS, outputs % PANEL_COLUMNS
        self._weight.permute(0, 2, 1)[place] = values if self._bits == 8 else packed(values, INTEGER_GROUP)
        self._scale.permute(0, 3, 1, 2)[place] = scales


def dequantized(weight: torch.Tensor, scale: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first ``width`` outputs of a weight, ``[inputs, width]`` float32.

    ``weight`` and ``scale`` are as in ``IntegerLinear``.
    """
    groups: torch.Tensor = weight.unflatten(1, (scale.shape[1], -1))
    if scale.shape[2] == 2:
        groups = torch.cat((groups & 15, groups >> 4), dim=2)
    factors = scale.float()
    values = groups.float() * factors[:, :, :1]
    if scale.shape[2] == 2:
        values += factors[:, :, 1:]
    return values.flatten(1, 2).permute(1, 0, 2).flatten(1)[:, :width]
