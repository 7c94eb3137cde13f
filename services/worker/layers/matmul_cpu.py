"""Matrix product of torch's BLAS, which compiled functions can call without Python."""

import ctypes
from pathlib import Path

import llvmlite.binding
import numba
import numpy as np
import torch
from numba.core import types

from services.worker.described.memory import PANEL_COLUMNS

_SYMBOL, _COLUMNS = "tokasaurus_sgemm", PANEL_COLUMNS
# Fortran's sgemm. All arguments are addresses.
_sgemm = types.ExternalFunction(_SYMBOL, types.void(*[types.uintp] * 13))


def available() -> bool:
    """Register torch's sgemm for ``matmul``, and return whether this build of torch has it.

    Must have returned True before a function that calls ``matmul`` is compiled.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        address = ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return False
    llvmlite.binding.add_symbol(_SYMBOL, address)
    return True


@numba.njit(nogil=True)
def matmul(x, first, count, part, target, stride):
    """Add a product to 64 columns of a float32 matrix, in the calling thread.

    The product is that of ``x[:, first : first + count]`` and ``part``, the address of a contiguous matrix ``[count,
    64]``. ``x`` is contiguous float32. ``target`` is the address of the columns, whose rows are ``stride`` bytes apart.
    """
    rows, inputs = x.shape
    # Fortran sees each matrix transposed: target.T += part.T @ x.T.
    sizes = np.array([_COLUMNS, rows, count, inputs, stride // 4], np.int32)
    one, plain = np.ones(1, np.float32), np.array([ord("N")], np.uint8)
    size, factor, letter = sizes.ctypes.data, one.ctypes.data, plain.ctypes.data
    source = x.ctypes.data + first * 4
    _sgemm(letter, letter, size, size + 4, size + 8, factor, part, size, source, size + 12, factor, target, size + 16)
    # Numba frees an array after its last use, and an address does not count as a use.
    return sizes.size + one.size + plain.size
