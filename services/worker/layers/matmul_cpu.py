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
def matmul(x, weight, output, keep):
    """Compute ``output = x @ weight + keep * output`` in the calling thread.

    ``x [rows, inputs]`` and ``output [rows, outputs]`` are contiguous float32 arrays; ``weight`` is the address of that
    of a ``PanelLinear`` in float32; ``keep`` is 0 or 1.
    """
    rows, inputs, outputs = x.shape[0], x.shape[1], output.shape[1]
    panels = (outputs + _COLUMNS - 1) // _COLUMNS
    # Fortran sees each matrix transposed: output.T = weight.T @ x.T.
    sizes = np.array([_COLUMNS, rows, inputs, outputs, outputs - (panels - 1) * _COLUMNS], np.int32)
    factors = np.array([1.0, keep], np.float32)
    plain = np.array([ord("N")], np.uint8)
    size, factor = sizes.ctypes.data, factors.ctypes.data
    for panel in range(panels):
        _sgemm(
            plain.ctypes.data,
            plain.ctypes.data,
            size if panel < panels - 1 else size + 16,
            size + 4,
            size + 8,
            factor,
            weight + panel * inputs * _COLUMNS * 4,
            size,
            x.ctypes.data,
            size + 8,
            factor + 4,
            output.ctypes.data + panel * _COLUMNS * 4,
            size + 12,
        )
    # Numba frees an array after its last use, and an address does not count as a use.
    return sizes.size + factors.size + plain.size
