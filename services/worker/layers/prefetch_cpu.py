"""Prefetch instruction for compiled functions."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_BYTE_POINTER, _INTEGER = ir.IntType(8).as_pointer(), ir.IntType(32)
FIRST_CACHE, SECOND_CACHE = 3, 2  # as LLVM numbers them


@intrinsic
def prefetch(context, array, first, second, third, fourth):
    """Prefetch the cache line of ``array[first, second, third, fourth]`` for reading."""
    signature = types.void(array, first, second, third, fourth)

    def generate(context, builder, signature, arguments):
        structure = context.make_array(signature.args[0])(context, builder, arguments[0])
        kinds = signature.args[1:]
        indices = [
            context.cast(builder, value, kind, types.intp) for value, kind in zip(arguments[1:], kinds, strict=True)
        ]
        address = cgutils.get_item_pointer(context, builder, signature.args[0], structure, indices)
        emit_prefetch(builder, builder.bitcast(address, _BYTE_POINTER), FIRST_CACHE)
        return context.get_dummy_value()

    return signature, generate


def emit_prefetch(builder: Any, address: Any, cache: int) -> None:
    """Emit a prefetch for reading into ``cache`` and those behind it. ``address`` is a pointer or an integer."""
    if isinstance(address.type, ir.IntType):
        address = builder.inttoptr(address, _BYTE_POINTER)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INTEGER, _INTEGER, _INTEGER])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, data = _INTEGER(0), _INTEGER(1)
    builder.call(function, [address, read, _INTEGER(cache), data])
