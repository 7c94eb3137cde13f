"""Matrix products for CPUs, which compiled functions call, and torch with integer weights."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numba
import numpy as np
import torch

from services.worker.described.memory import INTEGER_GROUP
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.integers import dequantized
from services.worker.layers.matmul_cpu import matmul
from services.worker.layers.operators import operator
from services.worker.layers.pairs_cpu import make_paired_product
from services.worker.layers.vectors_cpu import COLUMNS, Storage, make_add_product, most_rows

WeightStorage = Storage | Literal["bfloat16"]

_MATRIX = numba.float32[:, ::1]
# Rows from which on it is faster to convert the weight to float32 first, if registers hold the sums of one row only.
_MANY_ROWS = 32
# Rows up to which a product in vector instructions is faster than that of torch's library.
_MOST_ROWS = 32
# Rows of a float32 matrix that are read at once. Processors prefetch about this many.
_STREAMS = 8


@cache
def make_product(storage: WeightStorage) -> Callable[..., Any]:
    """Return a function for compiled functions, ``product(x, weight, scale, output, keep)``.

    It computes ``output = x @ weight + keep * output`` in the calling thread. ``x [rows, inputs]`` and ``output [rows,
    outputs]`` are contiguous float32 arrays, and ``keep`` is 0 or 1. ``weight`` and ``scale`` are addresses of the
    tensors of an ``IntegerLinear``, or ``weight`` is that of a ``Linear``'s, ``[inputs, outputs]`` float32, or that of
    a ``PairedLinear``'s for bfloat16.
    """
    if storage == "bfloat16":
        return make_paired_product()
    return _make_float_product() if storage == "float32" else _make_integer_product(storage)


def _make_float_product() -> Callable[..., Any]:
    block = most_rows()
    add_block, add_row = make_add_product("float32", block), make_add_product("float32", 1)
    columns, most = COLUMNS, _MOST_ROWS if block > 1 else 1

    @numba.njit(nogil=True)
    def product(x, weight, scale, output, keep):
        rows, inputs, outputs = x.shape[0], x.shape[1], output.shape[1]
        if rows > most or outputs % columns:
            return matmul(x, weight, output, keep)
        if keep == 0:
            output[:] = 0
        weight, stride = np.int64(weight), outputs * 4
        for first in range(0, inputs, _STREAMS):
            count = min(_STREAMS, inputs - first)
            row = 0
            while row < rows:
                source = x.ctypes.data + (row * inputs + first) * 4
                for panel in range(outputs // columns):
                    part = weight + first * stride + panel * columns * 4
                    place = output.ctypes.data + row * stride + panel * columns * 4
                    if row + block <= rows:
                        add_block(source, inputs * 4, part, stride, count, place, stride, 0, 0, 0)
                    else:
                        add_row(source, inputs * 4, part, stride, count, place, stride, 0, 0, 0)
                row += block if row + block <= rows else 1
        return 0

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
def _compiled(bits: int) -> Callable[..., None]:
    product = make_product("int8" if bits == 8 else "int4")

    def call(x, weight, scale, output):
        product(x, weight, scale, output, np.float32(0))

    return compile_function(call, numba.void(_MATRIX, numba.int64, numba.int64, _MATRIX), keep=False)


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
    product = _compiled(8 // scale.shape[2])
    product(rows.numpy(), weight.data_ptr(), scale.data_ptr(), output.numpy())
    return output.to(x.dtype)
