"""Linear layers whose weights are integers of 4 or 8 bits with a scale for each group of inputs, for CUDA.

Inputs have 16 bits. Other devices compute in float32 with plain torch, as a reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from services.common.model.quantized.scheme import ALL, Scheme
from services.common.model.quantized.tensors import MXFP4_BLOCK
from services.worker.described.memory import grouped_size
from services.worker.layers.cuda_devices import takes_ptx
from services.worker.layers.mxfp4 import as_scales, from_mxfp4, to_mxfp4
from services.worker.layers.parts import part_targets, spans
from services.worker.layers.quantized_weight import QuantizedWeight

_LONGEST_TILE = 128
# Rows that are quantized at once, to bound the memory of copies.
_QUANTIZED_ROWS = 4096


def middle(bits: int) -> int:
    """Return the code of zero, if a weight has no offsets."""
    return 1 << (bits - 1)


def tile_size(bits: int, group: int, inputs: int) -> int:
    """Return how many inputs are stored together, 32, 64 or 128. With 4 bits, each half of a tile is in one group."""
    size = min(_LONGEST_TILE, group & -group)
    # A half of a tile should have at least the 32 inputs that the tensor cores multiply efficiently.
    return 2 * size if bits == 4 and size == 32 == group and inputs % 64 == 0 else size


def to_grouped(rows: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``rows [rows, inputs]`` of any float dtype to the nearest values, without offsets.

    Returns codes ``[rows, inputs]`` uint8 and scales ``[rows, groups]`` float32. With 4 bits, the value of a group that
    is farthest from zero becomes the code 0, so a scale may be negative. A value that is not finite makes its group NaN
    or infinite.
    """
    groups = rows.float().unflatten(1, (-1, group))
    if bits == 8:
        scales = groups.abs().amax(dim=2) / 127
    else:
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scales = extreme.squeeze(2) / -middle(bits)
    inverse = torch.where(scales == 0, 0.0, 1 / scales).unsqueeze(2)
    codes = (groups * inverse).round_().add_(middle(bits)).clamp_(0, (1 << bits) - 1)
    return codes.flatten(1).to(torch.uint8), scales


def packed(codes: torch.Tensor, tile: int) -> torch.Tensor:
    """Return ``codes [rows, inputs]`` from 0 to 15 in bytes, ``[rows, inputs / 2]``.

    The low halves of a tile's bytes are the first half of the tile, and the high halves are the second half.
    """
    low, high = codes.unflatten(1, (-1, 2, tile // 2)).unbind(2)
    pairs: torch.Tensor = low | high << 4
    return pairs.flatten(1)


def unpacked(pairs: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the codes that ``packed`` has stored in ``pairs``."""
    tiles = pairs.unflatten(1, (-1, tile // 2))
    return torch.stack((tiles & 15, tiles >> 4), dim=2).flatten(1)


class GroupedWeights(NamedTuple):
    """The tensors of a weight of integers, or of floats of 4 bits.

    A value is ``(code - middle) * scale + offset``, where ``middle`` is 8 or 128. Scale and offset are those of the
    output and of the group of inputs. In MXFP4, a value is the float of its code times a power of two.
    """

    codes: torch.Tensor  # [outputs, inputs * bits / 8] uint8, as ``packed`` returns them if ``bits`` is 4
    scales: torch.Tensor  # [groups, outputs] float32; in MXFP4 exponents uint8
    offsets: torch.Tensor | None  # as ``scales``
    bias: torch.Tensor | None  # [outputs], of the rows' dtype
    bits: int
    order: torch.Tensor | None = None  # as in ``GroupedLinear``; kernels take rows in this order

    @classmethod
    def of(cls, linear: "GroupedLinear") -> "GroupedWeights":
        """Return the tensors of ``linear``."""
        return cls(linear.codes, linear.scales, linear.offsets, linear.bias, linear.bits, linear.order)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        outputs, size = self.codes.shape
        return outputs, size * 8 // self.bits

    @property
    def floats(self) -> bool:
        """True for weights in MXFP4."""
        return self.scales.dtype == torch.uint8

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[1] // self.scales.shape[0]

    @property
    def tile(self) -> int:
        """Number of inputs that are stored together."""
        return tile_size(self.bits, self.group, self.shape[1])

    @property
    def wide_tile(self) -> int:
        """Number of inputs of a tile in the kernels for many rows, at least 64 if they take these weights.

        Codes of 8 bits are stored in the order of the inputs. So a tile may have two groups of 32, as with 4 bits.
        """
        paired = self.bits == 8 and self.group == 32 and self.shape[1] % 64 == 0
        return 64 if paired else self.tile

    def constants(self) -> dict[str, int | bool]:
        """Return the arguments that all kernels take."""
        outputs, inputs = self.shape
        return {
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            "BITS": self.bits,
            "GROUP": self.group,
            "TILE": self.tile,
            "OFFSETS": self.offsets is not None,
            "ASM": takes_ptx(self.codes.device),
        }

    def dequantized(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the weights of the outputs ``start`` to ``stop``, ``[outputs, inputs]`` float32."""
        codes = self.codes[start:stop]
        codes = codes if self.bits == 8 else unpacked(codes, self.tile)
        values = from_mxfp4(codes) if self.floats else codes.float().sub_(middle(self.bits))
        values = values.unflatten(1, (-1, self.group))
        scales = as_scales(self.scales) if self.floats else self.scales
        values.mul_(scales.t()[start:stop].unsqueeze(2))
        if self.offsets is not None:
            values.add_(self.offsets.t()[start:stop].unsqueeze(2))
        rows: torch.Tensor = values.flatten(1)
        return rows if self.order is None else rows[:, self.order.argsort()]


class InputOrder:
    """The order in which a layer stores its inputs, which is the same for all its parts."""

    def __init__(self, stored: torch.Tensor) -> None:
        """Create the order of a layer whose buffer is ``stored``. The first part that is loaded chooses the order."""
        self._stored = stored
        self._chosen: torch.Tensor | None = None

    def choose(self, order: torch.Tensor) -> None:
        """Choose ``order [inputs]``, without storing it. Raises ``ValueError`` if a part has chosen another one."""
        if self._chosen is None:
            self._chosen = order
        elif not torch.equal(self._chosen, order):
            raise ValueError("its order of inputs (g_idx) differs from that of another part of the same layer")

    def settle(self) -> torch.Tensor:
        """Store the chosen order, or choose the stored one. Return the buffer."""
        if self._chosen is None:
            self._chosen = self._stored.cpu()
        return self._stored.copy_(self._chosen)


class GroupedLinear(nn.Module):
    """Linear layer from ``[rows, inputs]`` to ``[rows, sum(outputs)]``, with a weight of ``bits`` 4 or 8."""

    quantizes, narrows = False, True
    codes: torch.Tensor  # this and the next two are as in ``GroupedWeights``
    scales: torch.Tensor
    offsets: torch.Tensor | None
    order: torch.Tensor | None  # [inputs] int64, the input whose weights are at each place of a row

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[int],
        bias: bool = False,
        *,
        bits: int,
        group: int = 0,
        offsets: bool = False,
        ordered: bool = False,
        floats: bool = False,
    ) -> None:
        """Create a layer of zeros. ``outputs`` is as in ``Linear``.

        ``group`` is the number of inputs that share a scale; 0 chooses 128, 64 or 32. With ``ordered``, the members of
        a group need not be neighbours. With ``floats``, the weight is in MXFP4, with groups of 32: on CUDA, only the
        kernels for experts multiply it. Raises ``ValueError`` if an argument is not supported.
        """
        super().__init__()
        group = group or grouped_size(inputs)
        if bits not in (4, 8) or inputs % group or group % 32:
            raise ValueError(
                f"bits={bits} and group={group} with inputs={inputs}: expected 4 or 8 bits, and groups of a multiple"
                " of 32 inputs that divides the inputs"
            )
        if floats and (bits, group, offsets) != (4, MXFP4_BLOCK, False):
            raise ValueError(
                f"bits={bits}, group={group} and offsets={offsets} in MXFP4: expected 4 bits, groups of {MXFP4_BLOCK}"
                " inputs and no offsets"
            )
        self.outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        self.inputs, self.bits, self.group, width = inputs, bits, group, sum(self.outputs)
        self.tile = tile_size(bits, group, inputs)
        self.register_buffer("codes", torch.zeros(width, inputs * bits // 8, dtype=torch.uint8))
        scales = torch.zeros(inputs // group, width, dtype=torch.uint8 if floats else torch.float32)
        self.register_buffer("scales", scales)
        self.register_buffer("offsets", torch.zeros_like(scales) if offsets else None)
        # A sleep that drops the weights must not drop the order, because new weights do not have it.
        self.register_buffer("order", torch.arange(inputs) if ordered else None, persistent=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result ``[rows, sum(outputs)]``. If ``onto`` is given, add to it in place and return it."""
        product: torch.Tensor
        if x.device.type == "cpu":
            product = F.linear(x.float(), self.dequantized(), None if self.bias is None else self.bias.float()).to(
                x.dtype
            )
        else:
            ordered = x if self.order is None else x.index_select(1, self.order)
            tensors = self.codes, self.scales, self.offsets, self.bias
            product = torch.ops.tokasaurus.grouped_product(ordered, *tensors, self.bits)
        return product if onto is None else onto.add_(product)

    def dequantized(self) -> torch.Tensor:
        """Return the weight, ``[sum(outputs), inputs]`` float32."""
        return GroupedWeights.of(self).dequantized()

    def targets(self, *names: str) -> "dict[str, torch.Tensor | GroupedRows]":
        """Return load targets that quantize, by checkpoint name. ``names`` are the prefixes of the parts."""
        order = None if self.order is None else InputOrder(self.order)
        parts = (GroupedRows(GroupedWeights.of(self), start, size, order) for start, size in spans(self.outputs))
        return part_targets(names, parts, self.bias, self.outputs)


class GroupedRows:
    """Load target for the outputs ``start`` to ``start + size`` of ``weights``.

    ``order`` is that of the layer, if ``weights`` have one.
    """

    def __init__(self, weights: GroupedWeights, start: int, size: int, order: InputOrder | None = None) -> None:
        self._weights, self._start, self._inputs, self._order = weights, start, weights.shape[1], order
        self.shape, self.device = torch.Size((size, self._inputs)), weights.codes.device

    def copy_(self, tensor: torch.Tensor) -> None:
        """Quantize and store ``tensor [outputs, inputs]`` of any dtype and device."""
        weights = self._weights
        order = None if self._order is None else self._order.settle()
        for first in range(0, len(tensor), _QUANTIZED_ROWS):
            rows = tensor[first : first + _QUANTIZED_ROWS].to(self.device)
            rows = rows if order is None else rows[:, order]
            found = to_mxfp4(rows) if weights.floats else to_grouped(rows, weights.bits, weights.group)
            self._store(first, *found, None)

    def keeps(self, scheme: Scheme) -> bool:
        """Return whether ``copy_quantized`` takes weights of ``scheme``."""
        weights = self._weights
        rows, columns = scheme.block or (1, ALL)
        return (
            scheme.kind == "int"
            and not weights.floats
            # Parts of a matrix in a GGUF file may have fewer bits than others.
            and (scheme.bits == weights.bits or (scheme.name != "" and scheme.bits < weights.bits))
            and rows in (ALL, 1)
            and (columns or self._inputs) % weights.group == 0
            and (weights.offsets is not None or not scheme.zeros or scheme.symmetric)
            and (self._order is not None or not scheme.act_order or columns == ALL)
        )

    def check_quantized(self, weight: QuantizedWeight) -> None:
        """Raise ``ValueError`` if ``copy_quantized`` would refuse ``weight``.

        The order of its inputs is compared with those of the parts that were checked or stored before.
        """
        order = self._sorted(weight.columns)
        if self._order is not None:
            self._order.choose(order)
        scales, offsets = self._factors(weight)
        groups = self._inputs // self._weights.group
        if len(scales) not in (1, self.shape[0]) or groups % scales.shape[1]:
            raise ValueError(
                f"scales {list(scales.shape)} for {self.shape[0]} outputs and {groups} groups: expected a row for each"
                " output, or one row, and a divisor of the groups"
            )
        # NaN comes from a scale that is not finite.
        if self._weights.offsets is None and offsets is not None and bool((offsets.abs() > 0).any()):
            raise ValueError("it has zero points, and its settings say that it has none")

    def copy_quantized(self, weight: QuantizedWeight) -> None:
        """Store the values of ``weight [outputs, inputs]``, which are integers, unchanged.

        Its number of groups divides that of the layer. Raises ``ValueError`` if the layer cannot store the weight.
        """
        self.check_quantized(weight)
        codes = weight.codes
        if self._order is not None:
            codes = codes[:, self._order.settle().to(codes.device)]
        scales, offsets = self._factors(weight)
        for first in range(0, len(codes), _QUANTIZED_ROWS):
            rows = codes[first : first + _QUANTIZED_ROWS].to(self.device)
            part = slice(first, first + len(rows))
            stored = (rows.to(torch.int16) + self._shift(weight)).to(torch.uint8)
            own = None if offsets is None else self._of_rows(offsets, part)
            self._store(first, stored, self._of_rows(scales, part), own)

    def copy_to(self, rows: torch.Tensor) -> None:
        """Copy the first values, as the product reads them, to ``rows [rows, inputs]`` float32."""
        rows.copy_(self._weights.dequantized(self._start, self._start + len(rows)))

    def _shift(self, weight: QuantizedWeight) -> int:
        """Return what to add to the codes of ``weight``, int8 around 0 or uint8, before they are stored."""
        zero = middle(self._weights.bits)
        return zero if weight.codes.dtype == torch.int8 else zero - middle(weight.scheme.bits)

    def _factors(self, weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scales of ``weight`` in float32, and the offsets of its groups, of the same shape, or None."""
        scales, zeros = weight.scales.float(), weight.zeros
        if zeros is None and weight.offsets is None and weight.codes.dtype == torch.int8:
            return scales, None
        zero = middle(self._weights.bits) - self._shift(weight)
        offsets = (zero - (0 if zeros is None else zeros.float())) * scales
        return scales, offsets if weight.offsets is None else offsets + weight.offsets

    def _of_rows(self, blocks: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the values of the rows ``part``, ``[rows, groups]``. ``blocks`` are for one row or for all rows."""
        rows = blocks if len(blocks) == 1 else blocks[part]
        groups = self._inputs // self._weights.group
        return rows.to(self.device).repeat_interleave(groups // blocks.shape[1], dim=1)

    def _store(self, first: int, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> None:
        """Store ``codes [rows, inputs]`` with ``scales`` and ``offsets [rows or 1, groups]`` from row ``first``."""
        weights, start = self._weights, self._start + first
        place = slice(start, start + len(codes))
        weights.codes[place] = codes if weights.bits == 8 else packed(codes, weights.tile)
        weights.scales[:, place] = scales.t()
        if weights.offsets is not None:
            weights.offsets[:, place] = 0 if offsets is None else offsets.t()

    def _sorted(self, columns: torch.Tensor | None) -> torch.Tensor:
        """Return the inputs sorted by their group, which ``columns`` has. None: neighbours share a group.

        Raises ``ValueError`` if the layer stores no order of inputs, or the groups have different sizes.
        """
        if columns is None:
            return torch.arange(self._inputs)
        if self._order is None:
            raise ValueError(
                "inputs of a group are not neighbours (g_idx), and the settings say that they are (desc_act)"
            )
        sizes = columns.bincount()
        if bool((sizes != sizes[0]).any()):
            raise ValueError(f"the groups have {int(sizes.min())} to {int(sizes.max())} inputs; they must be equal")
        return columns.argsort(stable=True)
