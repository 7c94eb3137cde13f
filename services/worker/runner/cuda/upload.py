"""Arrays of one step on their way to the device: one pinned buffer, one copy."""

import numpy as np
import torch

# Every array begins at a multiple of so many bytes: kernels are compiled for aligned pointers.
_ALIGNMENT = 16


class Upload:
    """A pinned buffer and its twin on the device; ``put`` fills the first, ``send`` copies it into the second.

    Used by the compute thread for one step at a time, and not again before the device is through with that step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """``size`` in bytes."""
        self._device = device
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._host.numpy()
        self.on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self.used = 0  # bytes

    def begin(self) -> None:
        """Forget the last step's arrays."""
        self.used = 0

    def put(self, array: np.ndarray) -> torch.Tensor:
        """A view on the device, of ``array``'s shape and dtype, that holds ``array`` once the upload was sent;
        not at the begin of its memory, unless it is the first.

        What does not fit goes by a copy of its own.
        """
        array = np.ascontiguousarray(array)
        begin, end = self.used, self.used + array.nbytes
        if end > len(self._bytes):
            # Rare and large, such as the page tables of many long prompts that are admitted in one step.
            spare = np.concatenate([np.zeros(_ALIGNMENT, np.uint8), array.reshape(-1).view(np.uint8)])
            sent = torch.from_numpy(spare).pin_memory().to(self._device, non_blocking=True)
            return sent[_ALIGNMENT:].view(torch.from_numpy(array).dtype).view(array.shape)
        self.used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._bytes[begin:end] = array.reshape(-1).view(np.uint8)
        return self.on_device[begin:end].view(torch.from_numpy(array).dtype).view(array.shape)

    def send(self) -> None:
        """Copy what was put, on the current stream."""
        if self.used:
            self.on_device[: self.used].copy_(self._host[: self.used], non_blocking=True)
