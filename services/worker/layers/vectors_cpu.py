"""Products of a few rows with 64 columns of a matrix, as vector instructions in compiled functions.

Numba turns loops into vector instructions only if it recognises them. Here the instructions are written down, so that
the sums of all rows stay in registers and a weight is converted once for the rows.
"""

from collections.abc import Callable
from typing import Any, Literal

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.described.memory import INTEGER_GROUP
from services.worker.described.memory import PANEL_COLUMNS as COLUMNS
from services.worker.layers.lanes_cpu import FLOAT, INTEGER, int64, multiply_add, read, spread
from services.worker.layers.prefetch_cpu import emit_prefetch

IntegerStorage = Literal["int8", "int4"]
Storage = Literal["float32"] | IntegerStorage

_FLOATS, _INTEGERS = ir.VectorType(FLOAT, COLUMNS), ir.VectorType(INTEGER, COLUMNS)
_BYTES, _HALVES = ir.VectorType(ir.IntType(8), COLUMNS), ir.VectorType(ir.HalfType(), COLUMNS)
_STORED = {"float32": _FLOATS, "int8": _BYTES, "int4": _BYTES}
_SCALES = {"float32": 0, "int8": 1, "int4": 2}
# Distance in bytes from the integers that are multiplied to those that are prefetched.
_AHEAD = 6 << 10


def most_rows() -> int:
    """Return the number of rows whose sums fit into this processor's registers."""
    return 4 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 1


def make_add_product(rows: int) -> Callable[..., Any]:
    """Return a function that adds the product of ``rows`` rows and a part of a panel to an output.

    Compiled functions call it with addresses and sizes, all int64, in this order: ``x``, of float32 values, and the
    distance of its rows in bytes; ``weight``, of 64 float32 values a row; the number of rows of ``weight``; ``output``,
    of float32 values, and the distance of its rows in bytes; and ``ahead``, an address, and ``step``, in bytes. Row
    ``i`` prefetches the cache lines at ``ahead + i * step`` and half a step further: ``step`` is one line or two.
    """

    @intrinsic
    def add_product(typing, x, x_stride, weight, count, output, output_stride, ahead, step):
        signature = types.void(*[types.intp] * 8)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            *operands, ahead, step = arguments
            _generate(builder, "float32", rows, *operands, ahead=ahead, step=step)
            return context.get_dummy_value()

        return signature, generate

    function: Callable[..., Any] = add_product
    return function


def make_add_integer_product(storage: IntegerStorage, rows: int) -> Callable[..., Any]:
    """Return a function like that of ``make_add_product`` for a group of a panel of integers.

    It has other arguments after ``output`` and the distance of its rows: ``scale``, of 64 float16 factors, followed by
    64 float16 offsets for int4; and ``sums``, of the sums of the rows of ``x``, and their distance in bytes. ``sums``
    is read for int4 only.

    A byte of int4 has the value of row ``i`` in its low half, and in its high half that of row ``i + n``, where ``n``
    is the number of rows of ``weight``.
    """

    @intrinsic
    def add_product(typing, x, x_stride, weight, count, output, output_stride, scale, sums, sums_stride):
        signature = types.void(*[types.intp] * 9)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            *operands, scale, sums, sums_stride = arguments
            _generate(builder, storage, rows, *operands, scale=scale, sums=sums, sums_stride=sums_stride)
            return context.get_dummy_value()

        return signature, generate

    function: Callable[..., Any] = add_product
    return function


def make_add_widening_product(storage: IntegerStorage, rows: int) -> Callable[..., Any]:
    """Return a function that adds the product of ``rows`` rows, and stores the float32 values of the integers.

    Compiled functions call it with addresses and sizes, all int64, in this order: ``x`` and the distance of its rows,
    as in ``make_add_product``; ``weight``, of the integers of whole groups of a panel; the number of groups; ``scale``,
    of the factors of each group as in ``make_add_integer_product``; ``output`` and the distance of its rows; and
    ``target``, of the float32 values, which are 64 a row.

    The processor converts the next integers while it waits for sums. A row has the same result as in
    ``make_add_product`` with the stored values. The integers ``_AHEAD`` bytes further are prefetched.
    """

    @intrinsic
    def add_product(typing, x, x_stride, weight, groups, scale, output, output_stride, target):
        signature = types.void(*[types.intp] * 8)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _generate_widening(builder, storage, rows, *arguments)
            return context.get_dummy_value()

        return signature, generate

    function: Callable[..., Any] = add_product
    return function


def _generate(
    builder: Any,
    storage: Storage,
    rows: int,
    x: Any,
    x_stride: Any,
    weight: Any,
    count: Any,
    output: Any,
    output_stride: Any,
    *,
    ahead: Any = None,
    step: Any = None,
    scale: Any = None,
    sums: Any = None,
    sums_stride: Any = None,
) -> None:
    """Emit the instructions of a product. Without ``ahead``, ``weight`` has integers, and later ones are prefetched."""
    totals = _zeros(builder, rows)

    def add(index: Any, values: Any) -> None:
        _add_products(builder, totals, x, x_stride, index, values)

    with cgutils.for_range(builder, count) as loop:
        if ahead is None:
            place = builder.add(weight, builder.mul(loop.index, int64(COLUMNS)))
            emit_prefetch(builder, builder.add(place, int64(_AHEAD)))
        else:
            place = builder.add(ahead, builder.mul(loop.index, step))
            emit_prefetch(builder, place)
            emit_prefetch(builder, builder.add(place, builder.lshr(step, int64(1))))
        _use_row(builder, storage, weight, loop.index, count, add)
    factors = _factors(builder, storage, scale)
    for row, total in enumerate(totals):
        place = builder.add(output, builder.mul(output_stride, int64(row)))
        value = read(builder, place, _FLOATS)
        if factors:
            value = multiply_add(builder, builder.load(total), factors[0], value)
        else:
            value = builder.fadd(value, builder.load(total))
        if len(factors) > 1:
            offset = spread(builder, _at(builder, sums, sums_stride, row, int64(0)), COLUMNS)
            value = multiply_add(builder, offset, factors[1], value)
        _store(builder, place, value)


def _generate_widening(
    builder: Any,
    storage: IntegerStorage,
    rows: int,
    x: Any,
    x_stride: Any,
    weight: Any,
    groups: Any,
    scale: Any,
    output: Any,
    output_stride: Any,
    target: Any,
) -> None:
    """Emit the instructions of ``make_add_widening_product``. They add in the order of the inputs."""
    halves = 1 if storage == "int8" else 2
    count, scales = INTEGER_GROUP // halves, 2 * COLUMNS * _SCALES[storage]
    totals = _zeros(builder, rows)
    with cgutils.for_range(builder, groups) as outer:
        integers = builder.add(weight, builder.mul(outer.index, int64(count * COLUMNS)))
        factors = _factors(builder, storage, builder.add(scale, builder.mul(outer.index, int64(scales))))
        for half in range(halves):
            first = builder.add(builder.mul(outer.index, int64(INTEGER_GROUP)), int64(half * count))
            with cgutils.for_range(builder, int64(count)) as loop:
                place = builder.add(integers, builder.mul(loop.index, int64(COLUMNS)))
                if half == 0:
                    emit_prefetch(builder, builder.add(place, int64(_AHEAD)))
                values = _half(builder, storage, read(builder, place, _BYTES), half)
                if len(factors) > 1:
                    values = multiply_add(builder, values, factors[0], factors[1])
                else:
                    values = builder.fmul(values, factors[0])
                index = builder.add(first, loop.index)
                place = builder.add(target, builder.mul(index, int64(4 * COLUMNS)))
                _store(builder, place, values)
                _add_products(builder, totals, x, x_stride, index, values)
    for row, total in enumerate(totals):
        place = builder.add(output, builder.mul(output_stride, int64(row)))
        value = builder.fadd(read(builder, place, _FLOATS), builder.load(total))
        _store(builder, place, value)


def _zeros(builder: Any, rows: int) -> list[Any]:
    """Return the addresses of the sums of each row, which are 0. LLVM keeps the sums in registers."""
    totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(rows)]
    for total in totals:
        builder.store(ir.Constant(_FLOATS, [0.0] * COLUMNS), total)
    return totals


def _add_products(builder: Any, totals: list[Any], x: Any, x_stride: Any, index: Any, values: Any) -> None:
    """Emit the addition of the products of ``values`` and input ``index`` of each row of ``x`` to ``totals``."""
    for row, total in enumerate(totals):
        factor = spread(builder, _at(builder, x, x_stride, row, index), COLUMNS)
        builder.store(multiply_add(builder, factor, values, builder.load(total)), total)


def _use_row(
    builder: Any, storage: Storage, weight: Any, row: Any, count: Any, use: Callable[[Any, Any], None]
) -> None:
    """Emit ``use(input, values)`` for each input in ``row`` of ``count`` rows of a weight. ``values`` are 64 floats."""
    size = COLUMNS * (4 if storage == "float32" else 1)
    stored = read(builder, builder.add(weight, builder.mul(row, int64(size))), _STORED[storage])
    use(row, _half(builder, storage, stored, 0))
    if storage == "int4":
        use(builder.add(row, count), _half(builder, storage, stored, 1))


def _half(builder: Any, storage: Storage, stored: Any, half: int) -> Any:
    """Return 64 values of ``storage`` as floats. For int4, ``half`` is 0 for the low halves of the bytes, or 1."""
    if storage == "float32":
        return stored
    if storage == "int8":
        return builder.sitofp(builder.sext(stored, _INTEGERS), _FLOATS)
    low, high = (ir.Constant(_BYTES, [value] * COLUMNS) for value in (15, 4))
    bits = builder.lshr(stored, high) if half else builder.and_(stored, low)
    return builder.uitofp(builder.zext(bits, _INTEGERS), _FLOATS)


def _factors(builder: Any, storage: Storage, scale: Any) -> list[Any]:
    """Return the 64 scales of a group, and for int4 the 64 offsets, as floats. Return none for float32."""
    places = (builder.add(scale, int64(2 * COLUMNS * index)) for index in range(_SCALES[storage]))
    return [builder.fpext(read(builder, place, _HALVES), _FLOATS) for place in places]


def _store(builder: Any, address: Any, values: Any) -> None:
    """Emit the store of 64 floats."""
    builder.store(values, builder.inttoptr(address, _FLOATS.as_pointer()), align=1)


def _at(builder: Any, address: Any, stride: Any, row: int, index: Any) -> Any:
    """Return the float32 at ``index`` of ``row``."""
    start = builder.add(address, builder.mul(stride, int64(row)))
    return read(builder, builder.add(start, builder.mul(index, int64(4))), FLOAT)
