"""Matrix products for CPUs, which compiled functions and torch call."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import numba
import numpy as np
import torch

from services.worker.described.memory import INTEGER_GROUP
from services.worker.described.memory import PANEL_COLUMNS as COLUMNS
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.matmul_cpu import available, matmul
from services.worker.layers.operators import operator
from services.worker.layers.pairs_cpu import make_add_pairs, paired
from services.worker.layers.team_cpu import claim, finish, wait
from services.worker.layers.tiles_cpu import make_add_tiles, multiplies_tiles
from services.worker.layers.vectors_cpu import (
    IntegerStorage,
    make_add_integer_product,
    make_add_product,
    make_add_widening_product,
    most_rows,
)

FloatStorage = Literal["float32", "bfloat16"]
WeightStorage = FloatStorage | IntegerStorage
Function = Callable[..., Any]

_MATRIX = numba.float32[:, ::1]
# Rows from which on torch's library is faster, if registers hold the sums of one row only.
_LIBRARY_ROWS = 32
# Rows of a panel that all rows of the input are multiplied by before the next. In float32 and with tiles they stay in
# the second cache (256 KiB), and in bfloat16 without tiles in the first (16 KiB).
_MANY_PANEL_ROWS, _FEW_PANEL_ROWS = 1024, 64
# Rows of a panel of integers that are converted at once if the input has more than twice the rows whose sums fit into
# the registers. In float32 they stay in the first cache (24 KiB).
_WIDENED_ROWS = 96
# Rows of the input that are multiplied by all panels before the next. They stay in the second cache beside a panel.
_INPUT_ROWS = 128
# Items of each thread's share of a product, if each has at least this number of rows.
_THREAD_ITEMS, _PIECE_ROWS = 8, 32
_LINE = 64  # bytes of a cache line


@cache
def make_product(storage: WeightStorage) -> Function:
    """Return a function for compiled functions, ``product(x, weight, scale, output, keep)``.

    It computes ``output = x @ weight + keep * output`` in the calling thread. ``x [rows, inputs]`` and ``output [rows,
    outputs]`` are contiguous float32 arrays, and ``keep`` is 0 or 1. ``weight`` and ``scale`` are addresses of the
    tensors of an ``IntegerLinear``, or ``weight`` is that of a ``PanelLinear``'s.
    """
    prepare, _, multiply_panel = _make_panel_product(storage)
    columns, most = COLUMNS, _INPUT_ROWS

    @numba.njit(nogil=True)
    def product(x, weight, scale, output, keep):
        for start in range(0, x.shape[0], most):
            rows, target = x[start : start + most], output[start : start + most]
            prepared = prepare(rows)
            for panel in range((output.shape[1] + columns - 1) // columns):
                multiply_panel(rows, prepared, panel, weight, scale, target, keep)

    function: Function = product
    return function


@cache
def make_team_product(storage: WeightStorage) -> Function:
    """Return a function for compiled functions that computes a product in all threads of a team.

    ``product(thread, counters, phase, x, weight, scale, bias, output, keep)`` takes part in a phase as one of the
    team's threads. It computes ``output = x @ weight + keep * output + bias``, with the arguments of ``make_product``.
    ``bias [outputs]`` float32 is empty if there is none. With AVX-512, an output does not depend on the number of
    threads.
    """
    prepare, rows_of, multiply_panel = _make_panel_product(storage)
    columns, most, least, wanted = COLUMNS, _INPUT_ROWS, _PIECE_ROWS, _THREAD_ITEMS

    @numba.njit(nogil=True)
    def product(thread, counters, phase, x, weight, scale, bias, output, keep):
        (rows, outputs), threads = output.shape, counters.shape[1] - 1
        panels = (outputs + columns - 1) // columns
        # Few panels are divided by rows, too, so that no thread has much more to do than the others.
        pieces = min((wanted * threads + panels - 1) // panels, rows // least)
        pieces = max(pieces, (rows + most - 1) // most)
        items = panels * pieces
        item = claim(counters, phase, items, thread)
        prepared = prepare(x if item < items else x[:0])
        while item < items:
            panel, piece = item // pieces, item % pieces
            first, last = rows * piece // pieces, rows * (piece + 1) // pieces
            begin, end = panel * columns, min((panel + 1) * columns, outputs)
            part, target = rows_of(prepared, first, last), output[first:last]
            multiply_panel(x[first:last], part, panel, weight, scale, target, keep)
            if bias.size:  # added in loops, as in ``_make_panel_product``
                for row in range(last - first):
                    for column in range(begin, end):
                        target[row, column] += bias[column]
            finish(counters, phase)
            item = claim(counters, phase, items, thread)
        wait(counters, phase, items)

    function: Function = product
    return function


def _make_panel_product(storage: WeightStorage) -> tuple[Function, Function, Function]:
    """Return functions for products.

    ``prepare(x)`` returns what ``multiply_panel`` needs for all panels, and ``rows_of(prepared, first, last)`` the part
    of it for some rows. ``multiply_panel(x, prepared, panel, weight, scale, output, keep)`` computes the columns of a
    panel, with the arguments of ``make_product``.
    """
    if storage == "float32" or storage == "bfloat16":
        prepare, rows_of, add_panel = _make_float_panel(storage)
    else:
        prepare, rows_of, add_panel = _make_integer_panel(storage)
    columns = COLUMNS

    @numba.njit(nogil=True)
    def multiply_panel(x, prepared, panel, weight, scale, output, keep):
        rows, outputs = output.shape
        begin, end = panel * columns, min((panel + 1) * columns, outputs)
        weight, scale = np.int64(weight), np.int64(scale)
        if keep == 0:
            output[:, begin:end] = 0
        if end - begin == columns:
            add_panel(x, prepared, panel, weight, scale, output.ctypes.data + begin * 4, outputs * 4)
            return output.size
        rest = np.zeros((rows, columns), np.float32)  # the last panel has fewer columns in the output
        add_panel(x, prepared, panel, weight, scale, rest.ctypes.data, columns * 4)
        # Loops, because numba takes seconds to compile an array addition, which can raise an error about shapes.
        for row in range(rows):
            for column in range(begin, end):
                output[row, column] += rest[row, column - begin]
        return rest.size  # numba frees an array after its last use, and an address does not count as a use

    return prepare, rows_of, multiply_panel


def _make_float_panel(storage: FloatStorage) -> tuple[Function, Function, Function]:
    """Return ``prepare`` and ``rows_of`` as in ``_make_panel_product``, and ``add_panel``.

    ``add_panel(x, prepared, panel, weight, scale, target, stride)`` adds the product of ``x`` and a panel to the 64
    columns at the address ``target``, whose rows are ``stride`` bytes apart.
    """
    add_part, columns = _make_add_part(storage), COLUMNS
    most = _MANY_PANEL_ROWS if storage == "float32" or multiplies_tiles() else _FEW_PANEL_ROWS

    @numba.njit(nogil=True)
    def add_panel(x, prepared, panel, weight, scale, target, stride):
        inputs = prepared.shape[1]
        for first in range(0, inputs, most):
            count = min(most, inputs - first)
            part, size = weight + (panel * inputs + first) * columns * 4, count * columns * 4
            add_part(prepared, first, count, part, target, stride, part + size, size)

    return paired if storage == "bfloat16" else _unchanged, _rows_of, add_panel


@numba.njit(nogil=True)
def _unchanged(x):
    return x


@numba.njit(nogil=True)
def _rows_of(prepared, first, last):
    return prepared[first:last]


def _make_add_part(storage: FloatStorage) -> Function:
    """Return ``add_part(x, first, count, part, target, stride, ahead, size)``, which adds the product of a part.

    The product is that of ``x[:, first : first + count]``, float32 or pairs of bfloat16, and ``part``, the address of
    ``count`` rows of a panel. ``target`` and ``stride`` are as in ``_make_float_panel``. After the first block of
    rows, the part is in a cache. Meanwhile ``size`` bytes from ``ahead``, the address of the next part, are prefetched.
    """
    if storage == "bfloat16" and multiplies_tiles():
        return make_add_tiles()
    block, least, line = most_rows(), _LIBRARY_ROWS, _LINE
    add_rows = _make_add_rows(make_add_pairs if storage == "bfloat16" else make_add_product, block)

    @numba.njit(nogil=True)
    def add_part(x, first, count, part, target, stride, ahead, size):
        rows, inputs = x.shape
        row = fetched = 0
        size = size if rows > block + 2 else 0  # a block of one or two rows is too short
        lines = 2 * line if rows <= 3 * block else line
        while row < rows:
            source, place = x.ctypes.data + (row * inputs + first) * 4, target + row * stride
            step = lines if fetched < size else 0
            add_rows(rows - row, source, inputs * 4, part, count, place, stride, ahead + fetched, step)
            row += block
            fetched += count * step
        return row

    @numba.njit(nogil=True)
    def add_many(x, first, count, part, target, stride, ahead, size):
        if len(x) >= least:
            return matmul(x, first, count, part, target, stride)
        return add_part(x, first, count, part, target, stride, ahead, size)

    function: Function = add_many if block == 1 and storage == "float32" and available() else add_part
    return function


def _make_add_rows(make: Callable[[int], Function], most: int) -> Function:
    """Return ``add_rows(rows, ...)``, which calls the function that ``make`` returns for ``min(rows, most)`` rows.

    The other arguments are those of that function.
    """
    add_most = make(most)
    if most == 1:

        @numba.njit(nogil=True)
        def add_rows(rows, *arguments):
            add_most(*arguments)

    else:
        add_fewer = _make_add_rows(make, most - 1)

        @numba.njit(nogil=True)
        def add_rows(rows, *arguments):
            if rows >= most:
                add_most(*arguments)
            else:
                add_fewer(rows, *arguments)

    function: Function = add_rows
    return function


def _make_integer_panel(storage: IntegerStorage) -> tuple[Function, Function, Function]:
    """Return functions as ``_make_float_panel``."""
    bits = 8 if storage == "int8" else 4
    block, most, group, columns, line = most_rows(), _WIDENED_ROWS, INTEGER_GROUP, COLUMNS, _LINE
    stored = group * bits // 8  # rows of a panel that a group takes
    add_rows = _make_add_rows(partial(make_add_integer_product, storage), block)
    add_widening, add_part = make_add_widening_product(storage, block), _make_add_part("float32")
    scales = 2 * columns * (8 // bits)  # bytes of the scales of a group

    @numba.njit(nogil=True)
    def prepare(x):
        """Return the sum of each group of ``x``, and memory for a part of a panel."""
        rows, groups = x.shape[0], x.shape[1] // group
        sums = np.zeros((rows, groups), np.float32)
        if bits == 4:
            for row in range(rows):
                for index in range(groups):
                    for i in range(index * group, (index + 1) * group):
                        sums[row, index] += x[row, i]
        return sums, np.empty(most * columns + line // 4, np.float32)

    @numba.njit(nogil=True)
    def rows_of(prepared, first, last):
        sums, buffer = prepared
        return sums[first:last], buffer

    @numba.njit(nogil=True)
    def add_panel(x, prepared, panel, weight, scale, target, stride):
        rows, groups = x.shape[0], x.shape[1] // group
        sums, buffer = prepared
        weight, scale = weight + panel * groups * stored * columns, scale + panel * groups * scales
        distance = groups * group * 4
        if rows > 2 * block:
            part, others, place = (buffer.ctypes.data + line - 1) // line * line, x[block:], target + block * stride
            for first in range(0, groups, most // group):
                count = min(most // group, groups - first)
                source = x.ctypes.data + first * group * 4
                integers, factors = weight + first * stored * columns, scale + first * scales
                add_widening(source, distance, integers, count, factors, target, stride, part)
                add_part(others, first * group, count * group, part, place, stride, part, 0)
            return
        for row in range(0, rows, block):
            source, total = x.ctypes.data + row * distance, sums.ctypes.data + row * groups * 4
            place = target + row * stride
            for index in range(groups):
                integers, factors = weight + index * stored * columns, scale + index * scales
                add_rows(
                    rows - row, source + index * group * 4, distance, integers, stored, place, stride, factors,
                    total + index * 4, groups * 4,
                )  # fmt: skip

    return prepare, rows_of, add_panel


@cache
def compiled_product(storage: WeightStorage) -> Callable[..., None]:
    """Return ``make_product(storage)`` for arrays ``x`` and ``output`` and addresses. The first call compiles it."""
    product = make_product(storage)

    def call(x, weight, scale, output):
        product(x, weight, scale, output, np.float32(0))

    return compile_function(call, numba.void(_MATRIX, numba.int64, numba.int64, _MATRIX))


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
    """Return the product of ``x`` and the weight of an ``IntegerLinear`` in the dtype of ``x``. Sums are in float32."""
    rows = x.float().contiguous()
    output = torch.empty(len(rows), width)
    product = compiled_product("int8" if scale.shape[2] == 1 else "int4")
    product(rows.numpy(), weight.data_ptr(), scale.data_ptr(), output.numpy())
    return output.to(x.dtype)
