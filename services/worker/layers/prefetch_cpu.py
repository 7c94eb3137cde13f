"""Prefetch instruction for compiled functions."""

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


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
        byte_pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = cgutils.get_item_pointer(context, builder, signature.args[0], structure, indices)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # Read access, highest locality, data cache.
        hints = [ir.Constant(integer, value) for value in (0, 3, 1)]
        builder.call(function, [builder.bitcast(address, byte_pointer), *hints])
        return context.get_dummy_value()

    return signature, generate
