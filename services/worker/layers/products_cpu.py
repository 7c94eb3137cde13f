"""Matrix products for CPUs, which compiled functions call, and torch with integer weights."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numba
import numpy as np
import torch

from services.worker.described.memory import INTEGER_GROUP
from services.worker.described.memory import PANEL_COLUMNS as COLUMNS
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.integers import dequantized
from services.worker.layers.matmul_cpu import available, matmul
from services.worker.layers.operators import operator
from services.worker.layers.pairs_cpu import make_paired_product
from services.worker.layers.vectors_cpu import Storage, make_add_product, most_rows

WeightStorage = Storage | Literal["bfloat16"]

_MATRIX = numba.float32[:, ::1]
# Rows from which on torch's library is faster, if registers hold the sums of one row only. Integers are converted to
# float32 first.
_MANY_ROWS = 32
# Inputs of a float32 panel that all rows are multiplied by before the next. They stay in the second cache: 256 KiB.
_BLOCK = 1024


@cache
def make_product(storage: WeightStorage) -> Callable[..., Any]:
    """Return a function for compiled functions, ``product(x, weight, scale, output, keep)``.

    It computes ``output = x @ weight + keep * output`` in the calling thread. ``x [rows, inputs]`` and ``output [rows,
    outputs]`` are contiguous float32 arrays, and ``keep`` is 0 or 1. ``weight`` and ``scale`` are addresses of the
    tensors of an ``IntegerLinear``, or ``weight`` is that of a ``PanelLinear``'s.
    """
    if storage == "bfloat16":
        return make_paired_product()
    return _make_float_product() if storage == "float32" else _make_integer_product(storage)


def _make_float_product() -> Callable[..., Any]:
    block = most_rows()
    add_block, add_row = make_add_product("float32", block), make_add_product("float32", 1)
    columns, most, many = COLUMNS, _BLOCK, _MANY_ROWS

    @numba.njit(nogil=True)
    def product(x, weight, scale, output, keep):
        rows, inputs, outputs = x.shape[0], x.shape[1], output.shape[1]
        weight = np.int64(weight)
        if block == 1 and rows >= many:
            return matmul(x, weight, output, keep)
        if keep == 0:
            output[:] = 0
        rest = np.zeros((rows, columns), np.float32)  # the last panel may have fewer columns in the output
        for panel in range((outputs + columns - 1) // columns):
            whole = (panel + 1) * columns <= outputs
            target = output.ctypes.data + panel * columns * 4 if whole else rest.ctypes.data
            stride = outputs * 4 if whole else columns * 4
            for first in range(0, inputs, most):
                count = min(most, inputs - first)
                part = weight + (panel * inputs + first) * columns * 4
                row = 0
                while row < rows:
                    source, place = x.ctypes.data + (row * inputs + first) * 4, target + row * stride
                    if row + block <= rows:
                        add_block(source, inputs * 4, part, columns * 4, count, place, stride, 0, 0, 0)
                        row += block
                    else:
                        add_row(source, inputs * 4, part, columns * 4, count, place, stride, 0, 0, 0)
                        row += 1
            if not whole:
                output[:, panel * columns :] += rest[:, : outputs - panel * columns]
        return rest.size  # numba frees an array after its last use, and an address does not count as a use

    function: Callable[..., Any] = product
    return function


def _make_integer_product(storage: Storage) -> Callable[..., Any]:
    bits = 8 if storage == "int8" else 4
    block = most_rows()
    add_block, add_row = make_add_product(storage, block), make_add_product(storage, 1)
    group, columns = INTEGER_GROUP, COLUMNS
    stored = group * bits // 8  # rows of a panel that a group takes
    scales = 2 * columns * (8 // bits)  # bytes of the scales of a group

    @numba.njit(nogil=True)
    def product(x, weight, scale, output, keep):
        rows, inputs, outputs = x.shape[0], x.shape[1], output.shape[1]
        groups, panels = inputs // group, (outputs + columns - 1) // columns
        sums = np.zeros((rows, groups), np.float32)
        if bits == 4:
            for row in range(rows):
                for index in range(groups):
                    for i in range(index * group, (index + 1) * group):
                        sums[row, index] += x[row, i]
        if keep == 0:
            output[:] = 0
        rest = np.zeros((rows, columns), np.float32)  # the last panel may have fewer columns in the output
        weight, scale = np.int64(weight), np.int64(scale)
        for panel in range(panels):
            whole = (panel + 1) * columns <= outputs
            target = output.ctypes.data + panel * columns * 4 if whole else rest.ctypes.data
            stride = outputs * 4 if whole else columns * 4
            row = 0
            while row < rows:
                for index in range(groups):
                    first = x.ctypes.data + row * inputs * 4 + index * group * 4
                    part = weight + (panel * groups + index) * stored * columns
                    factors = scale + (panel * groups + index) * scales
                    total = sums.ctypes.data + (row * groups + index) * 4
                    place = target + row * stride
                    if row + block <= rows:
                        add_block(first, inputs * 4, part, columns, stored, place, stride, factors, total, groups * 4)
                    else:
                        add_row(first, inputs * 4, part, columns, stored, place, stride, factors, total, groups * 4)
                row += block if row + block <= rows else 1
            if not whole:
                output[:, panel * columns :] += rest[:, : outputs - panel * columns]
        # Numba frees an array after its last use, and an address does not count as a use.
        return sums.size + rest.size

    function: Callable[..., Any] = product
    return function


@cache
def compiled_product(storage: WeightStorage) -> Callable[..., None]:
    """Return ``make_product(storage)`` for arrays ``x`` and ``output`` and addresses. The first call compiles it."""
    if storage == "float32" and not available():
        raise RuntimeError("this build of torch has no sgemm; use Linear for weights in float32")
    product = make_product(storage)

    def call(x, weight, scale, output):
        product(x, weight, scale, output, np.float32(0))

    return compile_function(call, numba.void(_MATRIX, numba.int64, numba.int64, _MATRIX), keep=False)


@operator(
    "panel_product(Tensor x, Tensor weight, int width) -> Tensor",
    lambda x, weight, width: x.new_empty(x.shape[0], width),
)
def _panel_product(x: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return the product of ``x`` float32 and the weight of a ``PanelLinear``, in float32."""
    output = torch.empty(len(x), width)
    product = compiled_product("float32" if weight.dtype == torch.float32 else "bfloat16")
    product(x.contiguous().numpy(), weight.data_ptr(), 0, output.numpy())
    return output


@operator(
    "integer_product(Tensor x, Tensor weight, Tensor scale, int width) -> Tensor",
    lambda x, weight, scale, width: x.new_empty(x.shape[0], width),
)
def _integer_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``x @ dequantized(weight, scale, width)`` in the dtype of ``x``. Sums are in float32."""
    rows = x.float().contiguous()
    if len(rows) >= _MANY_ROWS and most_rows() == 1:
        return (rows @ dequantized(weight, scale, width)).to(x.dtype)
    output = torch.empty(len(rows), width)
    product = compiled_product("int8" if scale.shape[2] == 1 else "int4")
    product(rows.numpy(), weight.data_ptr(), scale.data_ptr(), output.numpy())
    return output.to(x.dtype)
