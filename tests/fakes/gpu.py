"""A GPU whose memory is that of the test's process: the fake of the CUDA driver."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

UUID = "0f1e2d3c-0000-1111-2222-333344445555"


class FakeGpu:
    """A GPU with ``shared``: the allocations that trainers share, as uint8 tensors by handle."""

    def __init__(self, uuid: str = UUID) -> None:
        self.uuid = uuid
        self.shared: dict[bytes, torch.Tensor] = {}
        self.opened: list[bytes] = []  # the handles that were opened, in their order
        self.open: dict[int, bytes] = {}  # handles by the address of their allocation
        self.fails: str | None = None  # name of a function that fails
        self.on_copy: Callable[[], object] = lambda: None  # called before a copy

    def share(self, *tensors: torch.Tensor) -> tuple[bytes, list[int]]:
        """Share copies of ``tensors`` in one allocation. Return its handle, and the offset of each tensor."""
        offsets, content = [], bytearray(b"\xff" * 3)  # offsets need no alignment
        for each in tensors:
            offsets.append(len(content))
            content += each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        handle = len(self.shared).to_bytes(64, "little")
        self.shared[handle] = torch.frombuffer(content, dtype=torch.uint8)
        return handle, offsets

    def call(self, name: str, *arguments: Any) -> None:
        """Do what the driver's function does."""
        if name == self.fails:
            raise RuntimeError(f"{name} failed: CUDA_ERROR_FAKE (999)")
        match name, arguments:
            case "cuIpcOpenMemHandle_v2", (address, handle, 1):
                if (found := self.shared.get(bytes(handle.reserved))) is None:
                    raise RuntimeError(f"{name} failed: CUDA_ERROR_INVALID_VALUE (1)")
                address._obj.value = found.data_ptr()
                self.opened.append(bytes(handle.reserved))
                self.open[found.data_ptr()] = bytes(handle.reserved)
            case "cuMemGetAddressRange_v2", (base, size, address):
                base._obj.value = address
                size._obj.value = self.shared[self.open[address]].nbytes
            case "cuIpcCloseMemHandle", (address,):
                del self.open[address]
            case _:
                raise AssertionError(f"{name}{arguments}")

    def copy_to_host(self, out: torch.Tensor, address: int) -> None:
        """Copy memory of an open allocation to ``out``."""
        self.on_copy()
        if self.fails == "copy":
            raise RuntimeError("cuMemcpyDtoHAsync_v2 failed: CUDA_ERROR_FAKE (999)")
        inside = (
            start <= address and address + out.nbytes <= start + self.shared[handle].nbytes
            for start, handle in self.open.items()
        )
        assert any(inside), "a copy reads memory that is not open"
        ctypes.memmove(out.data_ptr(), address, out.nbytes)
