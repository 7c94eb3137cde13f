"""Transfers of a step's arrays between host and device. All arrays of an upload are one copy."""

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
        self._device = device
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._host.numpy()
        self.on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self.used = 0  # bytes

    def begin(self) -> None:
        """Discard the arrays of the previous step."""
        self.used = 0

    def put(self, array: np.ndarray) -> torch.Tensor:
        """Add ``array``, and return a tensor on the device that has its values after ``send``.

        Only the first tensor is at the start of its memory. If the buffer is full, the array is copied separately.
        """
        array = np.ascontiguousarray(array)
        begin, end = self.used, self.used + array.nbytes
        if end > len(self._bytes):
            # This is rare: for example, the page tables of many long prompts that are admitted in one step.
            spare = np.concatenate([np.zeros(_ALIGNMENT, np.uint8), array.reshape(-1).view(np.uint8)])
            sent = torch.from_numpy(spare).pin_memory().to(self._device, non_blocking=True)
            return sent[_ALIGNMENT:].view(torch.from_numpy(array).dtype).view(array.shape)
        self.used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._bytes[begin:end] = array.reshape(-1).view(np.uint8)
        return self.on_device[begin:end].view(torch.from_numpy(array).dtype).view(array.shape)

    def send(self) -> None:
        """Copy the arrays to the device, on the current stream."""
        if self.used:
            self.on_device[: self.used].copy_(self._host[: self.used], non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory. It is complete when the current stream reaches this point."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)
