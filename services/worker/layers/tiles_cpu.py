"""Products with weights in bfloat16 by the matrix instructions of Intel processors (AMX), which multiply tiles.

A tile is a register of 16 rows of 64 bytes. Eight hold the sums of 16 rows and 64 outputs, a part of the input, and a
part of the weights. Panels of weights in bfloat16 are stored in the order in which these instructions read them.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.described.memory import PANEL_COLUMNS as COLUMNS
from services.worker.layers.lanes_cpu import int64
from services.worker.layers.prefetch_cpu import emit_prefetch

# Linux gives the registers to processes that ask for them (arch_prctl(2)).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_ROWS, _LINE = 16, 64  # of a tile, and bytes of its rows
_PAIR, _PANEL_ROW = 4, 4 * COLUMNS  # bytes
_TILES = _PANEL_ROW // _LINE  # tiles side by side in a panel
# Registers: one for the sums of each 16 outputs, then those of inputs and weights, and of the last of both.
_INPUT, _WEIGHT, _LAST_INPUT, _LAST_WEIGHT = range(_TILES, _TILES + 4)
# Bytes of the configuration of the registers, and where it has the bytes of a row and the rows of each.
_CONFIGURATION, _WIDTHS, _HEIGHTS = 64, 16, 48
_AHEAD = 16 << 10  # bytes between the weights that are multiplied and those that are prefetched

_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)
_POINTER = _BYTE.as_pointer()


@cache
def multiplies_tiles() -> bool:
    """Return whether this processor has tiles of bfloat16, and the operating system lets this process use them.

    Call it before a product with tiles runs, since it asks the system for the permission.
    """
    features = llvmlite.binding.get_host_cpu_features()
    if sys.platform != "linux" or not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def make_add_tiles() -> Callable[..., Any]:
    """Return ``add_part(x, first, count, part, target, stride, ahead, size)`` for pairs of bfloat16.

    The arguments are those of ``_make_add_part`` in ``products_cpu``. It prefetches by itself.
    """
    height, width = _ROWS, _PAIR

    @numba.njit(nogil=True)
    def add_part(x, first, count, part, target, stride, ahead, size):
        rows, inputs = x.shape
        for row in range(0, rows, height):
            source = x.ctypes.data + (row * inputs + first) * width
            place, missing = target + row * stride, row == 0
            _add_tiles(min(height, rows - row), source, inputs * width, part, count, place, stride, missing)
        return rows

    function: Callable[..., Any] = add_part
    return function


@intrinsic
def _add_tiles(typing, rows, x, x_stride, weight, count, output, output_stride, missing):
    """Add the product of at most 16 rows and a part of a panel to an output, in float32.

    ``x`` is the address of ``rows`` rows of ``count`` pairs of bfloat16, ``x_stride`` bytes apart, ``weight`` that of
    ``[count, 64]`` pairs, and ``output`` that of ``rows`` rows of 64 float32, ``output_stride`` bytes apart.
    ``missing`` is whether the weights are not in a cache yet, so that the next are prefetched.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, x, x_stride, weight, count, output, output_stride, missing = arguments
        rest = builder.urem(count, int64(_ROWS))
        _configure(builder, rows, rest)
        places = [(tile, builder.add(output, int64(tile * _LINE))) for tile in range(_TILES)]
        for tile, place in places:
            _load(builder, tile, place, output_stride)
        blocks = builder.udiv(count, int64(_ROWS))
        with cgutils.for_range(builder, blocks) as loop:
            part = builder.add(weight, builder.mul(loop.index, int64(_ROWS * _PANEL_ROW)))
            _load(builder, _INPUT, builder.add(x, builder.mul(loop.index, int64(_LINE))), x_stride)
            with builder.if_then(missing):
                for line in range(0, _ROWS * _PANEL_ROW, _LINE):
                    emit_prefetch(builder, builder.add(part, int64(_AHEAD + line)))
            _add_products(builder, _INPUT, _WEIGHT, part)
        with builder.if_then(builder.icmp_unsigned("!=", rest, int64(0))):
            _load(builder, _LAST_INPUT, builder.add(x, builder.mul(blocks, int64(_LINE))), x_stride)
            part = builder.add(weight, builder.mul(blocks, int64(_ROWS * _PANEL_ROW)))
            _add_products(builder, _LAST_INPUT, _LAST_WEIGHT, part)
        for tile, place in places:
            _call(builder, "tilestored64", _BYTE(tile), builder.inttoptr(place, _POINTER), output_stride)
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, types.boolean), generate


def _configure(builder: Any, rows: Any, rest: Any) -> None:
    """Emit the configuration of the registers for ``rows`` rows of the input. Its last tile has ``rest`` pairs."""
    kind = ir.ArrayType(_BYTE, _CONFIGURATION)
    configuration = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, bytearray([1] + [0] * (_CONFIGURATION - 1))), configuration)
    memory = builder.bitcast(configuration, _POINTER)
    some = builder.select(builder.icmp_unsigned("==", rest, int64(0)), int64(1), rest)  # 0 is not allowed
    line, height = int64(_LINE), int64(_ROWS)
    shapes = [(rows, line)] * (_TILES + 1) + [(height, line), (rows, builder.mul(some, int64(_PAIR))), (some, line)]
    for tile, (lines, width) in enumerate(shapes):
        place = builder.bitcast(builder.gep(memory, [int64(_WIDTHS + 2 * tile)]), _SHORT.as_pointer())
        builder.store(builder.trunc(width, _SHORT), place)
        builder.store(builder.trunc(lines, _BYTE), builder.gep(memory, [int64(_HEIGHTS + tile)]))
    _call(builder, "ldtilecfg", memory)


def _add_products(builder: Any, inputs: int, weights: int, part: Any) -> None:
    """Emit the products of the input's register and the weights at ``part``, which are added to all sums."""
    for tile in range(_TILES):
        _load(builder, weights, builder.add(part, int64(tile * _LINE)), int64(_PANEL_ROW))
        _call(builder, "tdpbf16ps", _BYTE(tile), _BYTE(inputs), _BYTE(weights))


def _load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(address, _POINTER), stride)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit an instruction by the name of LLVM's intrinsic."""
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)
