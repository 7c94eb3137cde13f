"""Functions of the CUDA driver that torch does not have, called through ctypes, so that no compiler is needed."""

import ctypes
from functools import cache
from typing import Any

import torch

_OUT_OF_MEMORY = 2  # error code
HANDLE_BYTES = 64  # of ``CUipcMemHandle``
POINTER = ctypes.c_uint64


class MemoryHandle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_SIGNATURES: dict[str, list[Any]] = {
    "cuMemGetAllocationGranularity": [ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p, ctypes.c_int],
    "cuMemAddressReserve": [
        *(ctypes.POINTER(POINTER), ctypes.c_size_t, ctypes.c_size_t, POINTER),
        ctypes.c_ulonglong,
    ],
    "cuMemAddressFree": [POINTER, ctypes.c_size_t],
    "cuMemCreate": [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong],
    "cuMemRelease": [ctypes.c_uint64],
    "cuMemMap": [POINTER, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong],
    "cuMemUnmap": [POINTER, ctypes.c_size_t],
    "cuMemSetAccess": [POINTER, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(POINTER), MemoryHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [POINTER],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(POINTER), ctypes.POINTER(ctypes.c_size_t), POINTER],
    "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, POINTER, ctypes.c_size_t, ctypes.c_void_p],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises ``RuntimeError`` with its name and the name of the error."""
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        error = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")
