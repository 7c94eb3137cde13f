"""Vector instructions for compiled functions on CPUs. The number of lanes is a power of two."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16  # float32 values of a vector
LOG2_E = 1.4426950408889634
FLOAT, INTEGER = ir.FloatType(), ir.IntType(32)
_SHORT = ir.IntType(16)
# 2**f on [-0.5, 0.5], relative error below 1e-7, from the highest power.
_POWERS = (0.000153707049, 0.00133998482, 0.00961837359, 0.0555032901, 0.240226477, 0.693147182, 1.0)
_LOWEST = -120.0  # smaller exponents of 2 count as this one
_ROUNDS = 1.5 * 2**23  # a small float32 plus this number has the rounded value in its lowest bits
_EXPONENT_BIAS, _FRACTION_BITS = 127, 23  # of float32


@intrinsic(prefer_literal=True)
def weigh(typing, lanes, scores, vectors):
    """Replace each score ``s`` by ``2**(s - m)``, where ``m`` is the largest. Return the sum, and ``m``, float32.

    ``scores`` is the address of ``vectors`` times ``lanes`` float32. A score of -inf adds almost nothing.
    """
    count = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, vectors = arguments
        floats, integers = ir.VectorType(FLOAT, count), ir.VectorType(INTEGER, count)

        def of(value: float) -> Any:
            return ir.Constant(floats, [float(np.float32(value))] * count)

        def larger(first: Any, second: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", first, second), first, second)

        largest, total = cgutils.alloca_once(builder, floats), cgutils.alloca_once(builder, floats)
        builder.store(of(-np.inf), largest)
        builder.store(of(0), total)
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.add(start, builder.mul(loop.index, int64(4 * count)))
            builder.store(larger(load(builder, place, 0, count), builder.load(largest)), largest)
        most = reduce(builder, builder.load(largest), larger)
        kind = ir.FunctionType(floats, [floats])
        rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{count}f32")
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.add(start, builder.mul(loop.index, int64(4 * count)))
            # 2**x = 2**round(x), from the exponent bits, times 2**f, from a polynomial. A NaN stays one.
            x = builder.fsub(load(builder, place, 0, count), most)
            x = builder.select(builder.fcmp_ordered("<", x, of(_LOWEST)), of(_LOWEST), x)
            f = builder.fsub(x, builder.call(rint, [x]))
            power = of(_POWERS[0])
            for coefficient in _POWERS[1:]:
                power = multiply_add(builder, power, f, of(coefficient))
            whole = builder.bitcast(builder.fadd(x, of(_ROUNDS)), integers)
            bits = builder.add(whole, ir.Constant(integers, [_EXPONENT_BIAS] * count))
            bits = builder.shl(bits, ir.Constant(integers, [_FRACTION_BITS] * count))
            weight = builder.fmul(power, builder.bitcast(bits, floats))
            builder.store(weight, builder.inttoptr(place, floats.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), weight), total)
        both = reduce(builder, builder.load(total), builder.fadd), most
        values = [builder.extract_element(each, INTEGER(0)) for each in both]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.float32, 2)(lanes, types.intp, types.intp), generate


def reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return a vector whose lanes all have the combination of all lanes.

    Lanes half a vector apart are combined first, then those a quarter apart, and so on.
    """
    half = vector.type.count // 2
    while half:
        other = shuffle(builder, vector, vector, [lane ^ half for lane in range(vector.type.count)])
        vector, half = combine(vector, other), half // 2
    return vector


def shuffle(builder: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    """Return a vector of the given lanes of two vectors, one behind the other."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INTEGER, len(lanes)), list(lanes)))


def spread(builder: Any, value: Any, lanes: int) -> Any:
    """Return a vector of ``lanes`` times ``value``."""
    single = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, INTEGER(0))
    return shuffle(builder, single, single, [0] * lanes)


def read(builder: Any, address: Any, kind: Any) -> Any:
    """Return the value of this type at ``address``, which may be any."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def load(builder: Any, address: Any, offset: int, lanes: int, element: int = 4) -> Any:
    """Return the ``lanes`` floats at ``offset`` bytes from ``address``, stored in ``element`` bytes: 2 for bfloat16."""
    kind = ir.VectorType(FLOAT if element == 4 else _SHORT, lanes)
    place = builder.inttoptr(builder.add(address, int64(offset)), kind.as_pointer())
    stored = builder.load(place, align=element)
    if element == 4:
        return stored
    integers = ir.VectorType(INTEGER, lanes)
    bits = builder.shl(builder.zext(stored, integers), ir.Constant(integers, [16] * lanes))
    return builder.bitcast(bits, ir.VectorType(FLOAT, lanes))


def multiply_add(builder: Any, first: Any, second: Any, added: Any) -> Any:
    """Return ``first * second + added`` of vectors, rounded once where the processor can.

    LLVM may choose which of two products is part of an addition, and chooses differently for one row and for four. This
    intrinsic leaves no choice, so a row has the same result among any rows.
    """
    kind = added.type
    function_type = ir.FunctionType(kind, [kind, kind, kind])
    name = f"llvm.fmuladd.v{kind.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [first, second, added])


def int64(value: int) -> Any:
    """Return a constant for addresses."""
    return ir.Constant(ir.IntType(64), value)
