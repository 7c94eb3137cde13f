"""Products with weights in bfloat16, of which instructions read two of an output at once."""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.described.memory import PANEL_COLUMNS as COLUMNS
from services.worker.layers.bfloat16_cpu import narrowed
from services.worker.layers.lanes_cpu import FLOAT, INTEGER, LANES, int64, read, spread
from services.worker.layers.prefetch_cpu import emit_prefetch

_VECTORS = COLUMNS // LANES
_PAIR = 4  # bytes
_FLOATS, _INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INTEGER, LANES)
_UPPER = 0xFFFF0000


class _Bfloat16(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type ``bfloat``, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_HALVES = ir.VectorType(_Bfloat16(), 2 * LANES)


def multiplies_bfloat16() -> bool:
    """Return whether this processor has AVX-512's instruction for products of bfloat16."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


def make_add_pairs(rows: int) -> Callable[..., Any]:
    """Return a function that adds the product of ``rows`` rows and a part of a panel to an output.

    Its arguments are those of ``make_add_product``. ``x`` and ``weight`` have pairs of bfloat16 values instead of
    float32 values.
    """
    has_instruction = multiplies_bfloat16()

    @intrinsic
    def add_pairs(typing, x, x_stride, weight, count, output, output_stride, ahead, step):
        signature = types.void(*[types.intp] * 8)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _generate(builder, rows, has_instruction, *arguments)
            return context.get_dummy_value()

        return signature, generate

    function: Callable[..., Any] = add_pairs
    return function


def _generate(
    builder: Any,
    rows: int,
    has_instruction: bool,
    x: Any,
    x_stride: Any,
    weight: Any,
    count: Any,
    output: Any,
    output_stride: Any,
    ahead: Any,
    step: Any,
) -> None:
    """Emit the instructions of ``make_add_pairs``."""
    zeros = ir.Constant(_FLOATS, [0.0] * LANES)
    totals = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(_VECTORS)] for _ in range(rows)]
    for total in (each for row in totals for each in row):
        builder.store(zeros, total)
    add = _add_by_instruction if has_instruction else _add_widened
    with cgutils.for_range(builder, count) as loop:
        place = builder.add(ahead, builder.mul(loop.index, step))
        emit_prefetch(builder, place)
        emit_prefetch(builder, builder.add(place, builder.lshr(step, int64(1))))
        start = builder.add(weight, builder.mul(loop.index, int64(COLUMNS * _PAIR)))
        weights = [read(builder, builder.add(start, int64(64 * index)), _INTEGERS) for index in range(_VECTORS)]
        for row, sums in enumerate(totals):
            place = builder.add(x, builder.mul(x_stride, int64(row)))
            pair = read(builder, builder.add(place, builder.mul(loop.index, int64(_PAIR))), INTEGER)
            add(builder, sums, pair, weights)
    for row, sums in enumerate(totals):
        for index, total in enumerate(sums):
            place = builder.add(output, builder.add(builder.mul(output_stride, int64(row)), int64(64 * index)))
            value = builder.fadd(read(builder, place, _FLOATS), builder.load(total))
            builder.store(value, builder.inttoptr(place, _FLOATS.as_pointer()), align=1)


def _add_by_instruction(builder: Any, totals: list[Any], pair: Any, weights: list[Any]) -> None:
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _HALVES, _HALVES])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    factor = builder.bitcast(spread(builder, pair, LANES), _HALVES)
    for total, each in zip(totals, weights, strict=True):
        value = builder.call(multiply, [builder.load(total), factor, builder.bitcast(each, _HALVES)])
        builder.store(value, total)


def _add_widened(builder: Any, totals: list[Any], pair: Any, weights: list[Any]) -> None:
    shift, upper = ir.Constant(_INTEGERS, [16] * LANES), ir.Constant(_INTEGERS, [_UPPER] * LANES)
    first = spread(builder, builder.bitcast(builder.shl(pair, INTEGER(16)), FLOAT), LANES)
    second = spread(builder, builder.bitcast(builder.and_(pair, INTEGER(_UPPER)), FLOAT), LANES)
    for total, each in zip(totals, weights, strict=True):
        value = builder.load(total)
        for factor, bits in ((first, builder.shl(each, shift)), (second, builder.and_(each, upper))):
            product = builder.fmul(factor, builder.bitcast(bits, _FLOATS), flags=("contract",))
            value = builder.fadd(value, product, flags=("contract",))
        builder.store(value, total)


@numba.njit(nogil=True)
def paired(x):
    """Return ``x [rows, inputs]`` float32 rounded to bfloat16, in pairs: ``[rows, inputs / 2]`` uint32."""
    rounded = np.empty(x.shape, np.uint16)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            rounded[row, i] = narrowed(x[row, i], np.uint16(0))
    return rounded.view(np.uint32)
