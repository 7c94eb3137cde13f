"""Blocks of memory with a fixed address, on a CUDA device.

Their memory is managed by the driver's functions for virtual memory. Kernels and CUDA graphs that hold addresses of a
block stay valid when its memory is replaced.
"""

import contextlib
import ctypes
import sys

import torch

from services.common.boundaries import undo_on_error
from services.worker.arena.cuda_driver import POINTER, call

_PINNED, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 3, 0  # constants of the driver


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """``CUmemAllocationProp.allocFlags``."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class CudaBlock:
    """A block in the memory of a CUDA device. It is freed when its tensor and all views of it are deleted."""

    def __init__(self, size: int, device: torch.device) -> None:
        """``size`` is in bytes. Raises ``torch.OutOfMemoryError``."""
        self._memory = _Memory(size, device)
        self.tensor = torch.as_tensor(self._memory, device=device)
        self.tensor.zero_()

    def release(self) -> None:
        """Give the memory back when all launched kernels have finished."""
        self._memory.unmap()

    def restore(self) -> None:
        self._memory.map()
        self.tensor.zero_()


class _Memory:
    """The addresses of a block, and the memory that is mapped there. A torch tensor over it owns a reference."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.set_device(device)  # the driver's functions need a current context
        self._index = torch.cuda.current_device()
        self._location = Location(_ON_DEVICE, self._index)
        self._properties = AllocationProperties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), _MINIMUM)
        self._size = -(-size // granularity.value) * granularity.value
        self._handle: int | None = None  # of the mapped memory
        address = POINTER()
        call("cuMemAddressReserve", ctypes.byref(address), self._size, 0, 0, 0)
        self._address = address.value
        # ``torch.as_tensor`` makes a tensor from this description.
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 2,
        }
        self.map()

    def map(self) -> None:
        """Map new memory. Raises ``torch.OutOfMemoryError``."""
        torch.cuda.set_device(self._index)
        handle = ctypes.c_uint64()
        call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._properties), 0)
        with undo_on_error(call, "cuMemRelease", handle.value):
            call("cuMemMap", self._address, self._size, 0, handle.value, 0)
        self._handle = handle.value
        access = AccessDescription(self._location, _READ_AND_WRITE)
        with undo_on_error(self.unmap):
            call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), 1)

    def unmap(self) -> None:
        """Unmap the memory and give it back when all launched kernels have finished."""
        torch.cuda.set_device(self._index)
        torch.cuda.synchronize(self._index)
        handle, self._handle = self._handle, None
        call("cuMemUnmap", self._address, self._size)
        call("cuMemRelease", handle)

    def __del__(self) -> None:
        if not hasattr(self, "_address") or sys.is_finalizing():  # the driver frees all memory of a process that ends
            return
        with contextlib.suppress(RuntimeError):  # the device is lost
            if self._handle is not None:
                self.unmap()
            call("cuMemAddressFree", self._address, self._size)
