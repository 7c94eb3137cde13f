"""Prefetch instruction for compiled functions."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_BYTE_POINTER, _INTEGER = ir.IntType(8).as_pointer(), ir.IntType(32)
_SECOND_CACHE = 2  # as LLVM numbers them


@intrinsic
def prefetch(typing, address):
    """Prefetch the cache line at ``address``, an integer, for reading, into the second cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def emit_prefetch(builder: Any, address: Any) -> None:
    """Emit a prefetch of the cache line at ``address``, an integer, for reading, into the second cache."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INTEGER, _INTEGER, _INTEGER])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, data = _INTEGER(0), _INTEGER(1)
    builder.call(function, [builder.inttoptr(address, _BYTE_POINTER), read, _INTEGER(_SECOND_CACHE), data])
