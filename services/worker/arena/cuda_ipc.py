"""Memory of GPUs that another process on this host shares by CUDA IPC."""

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from services.common.errors import FailedPrecondition, InvalidRequest
from services.worker.arena import cuda_driver
from services.worker.arena.cuda_driver import POINTER, MemoryHandle

_ENABLE_PEER_ACCESS = 1  # flag of the driver: the memory may lie on another GPU


class SharedCopy(NamedTuple):
    """The position of a tensor in an allocation of another process."""

    handle: bytes  # of the allocation, 64 bytes
    gpu_uuid: str  # of the allocation's GPU
    offset: int  # bytes from the start of the allocation


class Gpu(Protocol):
    """The GPU of a worker."""

    uuid: str

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver on this GPU. Raises ``RuntimeError`` with its name and that of the error."""

    def copy_to_host(self, out: torch.Tensor, address: int) -> None:
        """Copy device memory from ``address`` on to ``out``, in host memory. Return when it is copied.

        Raises ``RuntimeError``.
        """


class CudaGpu:
    """The CUDA device of a worker. Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # so that copies and steps do not wait for each other

    def call(self, name: str, *arguments: Any) -> None:
        torch.cuda.set_device(self._device)  # the driver's functions need a current context
        cuda_driver.call(name, *arguments)

    def copy_to_host(self, out: torch.Tensor, address: int) -> None:
        self.call("cuMemcpyDtoHAsync_v2", out.data_ptr(), address, out.nbytes, self._stream.cuda_stream)
        self._stream.synchronize()


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of ``device``, or None for a CPU."""
    return CudaGpu(device) if device.type == "cuda" else None


class SharedMemory(contextlib.ExitStack):
    """Allocations of other processes, opened when they are first used and closed at the end of the ``with`` block.

    Used by one thread.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._opened: dict[bytes, tuple[int, int]] = {}  # first address and size in bytes, by handle

    def locate(self, copies: Sequence[SharedCopy], size: int) -> int:
        """Return the address in this process of ``size`` bytes, which are the same in all ``copies``.

        The copy on this GPU is used, or the first one. Raises ``InvalidRequest`` if it cannot be opened, or if its
        allocation is too small.
        """
        own = [each for each in copies if _plain(each.gpu_uuid) == _plain(self._gpu.uuid)]
        chosen = (own or copies)[0]
        if chosen.handle not in self._opened:
            self._opened[chosen.handle] = self._open(chosen.handle)
        address, allocated = self._opened[chosen.handle]
        if chosen.offset + size > allocated:
            raise InvalidRequest(
                f"its {size:,} bytes begin at byte {chosen.offset:,} of an allocation of {allocated:,} bytes; send the"
                " offset from the start of the allocation"
            )
        return address + chosen.offset

    def copy_to_host(self, out: torch.Tensor, address: int) -> None:
        """Copy memory that ``locate`` has found to ``out``, in host memory. Raises ``FailedPrecondition``."""
        try:
            self._gpu.copy_to_host(out, address)
        except RuntimeError as error:
            raise FailedPrecondition(f"its memory cannot be read ({error}); repeat the update") from error

    def _open(self, handle: bytes) -> tuple[int, int]:
        """Return first address and size of an allocation."""
        address, base, size = POINTER(), POINTER(), ctypes.c_size_t()
        try:
            opened = MemoryHandle.from_buffer_copy(handle)
            self._gpu.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _ENABLE_PEER_ACCESS)
            self.callback(self._close, address.value)
            self._gpu.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address.value)
        except RuntimeError as error:
            raise InvalidRequest(
                f"its handle cannot be opened on the GPU {_plain(self._gpu.uuid)} ({error}); share memory of this GPU,"
                " or of another one to which it has peer access, and keep the memory until the call returns"
            ) from error
        return address.value, base.value + size.value - address.value

    def _close(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):  # the device is lost, and the process will end
            self._gpu.call("cuIpcCloseMemHandle", address)


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()
