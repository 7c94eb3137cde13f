"""Values in bfloat16 for compiled functions, which see them as uint16."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_INTEGER, _SHORT, _FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()
_NAN = 0x7FC0


@intrinsic
def narrowed(context, value, like):
    """Return the float32 ``value`` in the type of ``like``, which is float32, or uint16 for bfloat16.

    It is rounded to the nearest value, and to an even one in the middle.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.return_type == types.float32:
            return arguments[0]
        bits = builder.bitcast(arguments[0], _INTEGER)
        last = builder.and_(builder.lshr(bits, _INTEGER(16)), _INTEGER(1))
        rounded = builder.add(bits, builder.add(last, _INTEGER(0x7FFF)))
        upper = builder.trunc(builder.lshr(rounded, _INTEGER(16)), _SHORT)
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.select(is_nan, _SHORT(_NAN), upper)

    return like(types.float32, like), generate


@intrinsic
def widened(context, value):
    """Return ``value``, which is float32, or uint16 for bfloat16, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0] == types.float32:
            return arguments[0]
        return builder.bitcast(builder.shl(builder.zext(arguments[0], _INTEGER), _INTEGER(16)), _FLOAT)

    return types.float32(value), generate
