"""Transfers of a step's arrays between host and device. Arrays that are needed together are one copy."""

from typing import Any

import numpy as np
import torch

# Every array begins at a multiple of this many bytes, since kernels are compiled for aligned pointers.
_ALIGNMENT = 16


class Upload:
    """A pinned buffer, which ``put`` fills, and a buffer on the device, to which ``send`` copies it.

    Used by the compute thread, for one step at a time. The device must have completed the previous step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """``size`` in bytes."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._device = device
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._host.numpy()
        self._on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self._typed: dict[np.dtype[Any], torch.Tensor] = {}  # the buffer on the device as values of a dtype
        self._begin = self._end = 0  # bytes that ``put`` has filled and ``send`` has not copied

    def begin(self) -> None:
        """Discard the arrays of the previous step."""
        self._begin = self._end = 0

    @property
    def waiting(self) -> int:
        """Bytes that ``send`` will copy."""
        return self._end - self._begin

    def put(self, array: np.ndarray) -> torch.Tensor:
        """Add ``array``, and return a tensor on the device that has its values after ``send``.

        Only the first tensor is at the start of its memory. If the buffer is full, the array is copied separately.
        """
        array = np.ascontiguousarray(array)
        begin, end = self._end, self._end + array.nbytes
        if end > len(self._bytes):
            # This is rare: for example, the page tables of many long prompts that are admitted in one step.
            spare = np.concatenate([np.zeros(_ALIGNMENT, np.uint8), array.reshape(-1).view(np.uint8)])
            sent = torch.from_numpy(spare).pin_memory().to(self._device, non_blocking=True)
            return sent[_ALIGNMENT:].view(torch.from_numpy(array).dtype).view(array.shape)
        self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._bytes[begin:end] = array.reshape(-1).view(np.uint8)
        if (typed := self._typed.get(array.dtype)) is None:
            typed = self._typed[array.dtype] = self._on_device.view(torch.from_numpy(array).dtype)
        values = typed[begin // array.itemsize : end // array.itemsize]
        return values if array.ndim == 1 else values.view(array.shape)

    def send(self) -> None:
        """Copy the arrays that were put since the last call to the device, on the current stream."""
        if self.waiting:
            part = slice(self._begin, self._end)
            self._on_device[part].copy_(self._host[part], non_blocking=True)
            self._begin = self._end


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory. It is complete when the current stream reaches this point."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)
