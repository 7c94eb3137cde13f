"""The form of quantized weights, which is the same for all formats, and its conversion to float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from services.common.model.quantized.scheme import ALL, Scheme

_CONVERTED = 1 << 22  # values converted at once


class QuantizedWeight(NamedTuple):
    """A weight ``[rows, columns]``: ``(codes - zeros) * scales + offsets``. All but codes are those of a block."""

    scheme: Scheme
    codes: torch.Tensor  # [rows, columns] float8_e4m3fn, int8 or uint8
    scales: torch.Tensor  # [row blocks, column blocks] float32
    zeros: torch.Tensor | None  # as ``scales``, integers of any dtype; None = zeros are zero
    columns: torch.Tensor | None = None  # [columns] int64, the block of each column; None = neighbours share a block
    offsets: torch.Tensor | None = None  # as ``scales``; None = offsets are zero

    def narrow(self, dimension: int, start: int, size: int) -> "QuantizedWeight":
        """Return ``size`` rows (``dimension`` 0) or columns (1) from ``start``.

        Raises ``ValueError`` if they begin or end inside a block, or the columns of a block are not neighbours.
        """
        if self.columns is not None and dimension:
            raise ValueError("columns that share a scale are not neighbours, so the columns cannot be divided")
        block = self._block(dimension)
        stop = start + size
        if start % block or (stop % block and stop != self.codes.shape[dimension]):
            kind = "columns" if dimension else "rows"
            raise ValueError(f"{kind} {start} to {stop} are not whole blocks of {block} {kind}")

        def of_blocks(values: torch.Tensor) -> torch.Tensor:
            shared = values.shape[dimension] == 1
            return values if shared else values.narrow(dimension, start // block, -(-size // block))

        return self._replace(
            codes=self.codes.narrow(dimension, start, size),
            scales=of_blocks(self.scales),
            zeros=None if self.zeros is None else of_blocks(self.zeros),
            offsets=None if self.offsets is None else of_blocks(self.offsets),
        )

    def _block(self, dimension: int) -> int:
        """Return the number of rows or columns of a block, 1 if the block has all of them."""
        size = (self.scheme.block or (1, ALL))[dimension]
        return 1 if size == ALL or self.scales.shape[dimension] == 1 else size

    def cloned(self) -> "QuantizedWeight":
        """Return a copy in memory of its own, because files that are mapped may change."""
        columns = None if self.columns is None else self.columns.clone()
        return self.with_rows(torch.Tensor.clone)._replace(columns=columns)

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """Return the weight with ``change`` of the rows of each tensor. Each row must have scales of its own."""
        return self._replace(
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
            offsets=None if self.offsets is None else change(self.offsets),
        )

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors that are present."""
        return [each for each in self[1:] if each is not None]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(each.nbytes for each in self.parts)

    def dequantized(self) -> torch.Tensor:
        """Return the values, ``[rows, columns]`` float32."""
        rows, columns = self.codes.shape
        row_size, column_size = self.scheme.block or (ALL, ALL)
        size = columns if self.scales.shape[1] == 1 else column_size
        blocks = self.columns
        if blocks is None and columns % size:
            blocks = torch.arange(columns) // size
        values = torch.empty(rows, columns)
        count = max(1, _CONVERTED // columns)
        for start in range(0, rows, count):
            part = values[start : start + count].copy_(self.codes[start : start + count])
            lines = torch.arange(start, start + len(part))
            lines = torch.zeros_like(lines) if row_size == ALL else lines // row_size
            if self.zeros is not None:
                _of_blocks(part, size, blocks).sub_(_expanded(self.zeros.float(), lines, blocks))
            _of_blocks(part, size, blocks).mul_(_expanded(self.scales, lines, blocks))
            if self.offsets is not None:
                _of_blocks(part, size, blocks).add_(_expanded(self.offsets, lines, blocks))
        return values


def keeps(target: Any, scheme: Scheme) -> bool:
    """Return whether a load target stores weights of ``scheme`` without a change, with ``copy_quantized``."""
    return hasattr(target, "keeps") and target.keeps(scheme)


def _of_blocks(values: torch.Tensor, size: int, columns: torch.Tensor | None) -> torch.Tensor:
    """Return a view ``[rows, blocks, size]`` of ``values``, or ``values`` if ``columns`` has the block of each."""
    return values.unflatten(1, (-1, size)) if columns is None else values


def _expanded(blocks: torch.Tensor, lines: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Return the element of ``blocks`` of each value of the rows ``lines``, as ``_of_blocks`` has the values."""
    rows = blocks[lines]
    return rows.unsqueeze(-1) if columns is None else rows.index_select(1, columns)
