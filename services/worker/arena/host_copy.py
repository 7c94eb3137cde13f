"""Copies of device memory in the memory of the host."""

from collections.abc import Iterator, Sequence

import torch

from services.common.errors import FailedPrecondition
from services.common.host.resources import available_memory

_PIECE = 1 << 28  # bytes; torch rounds pinned memory up to powers of two


class HostCopy:
    """Host memory for a copy of tensors, each ``[size]`` uint8.

    On CUDA the memory is pinned, if the system allows it: copies from and to it are then several times faster.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate the memory. Any thread may call it. Raises ``FailedPrecondition`` if the host has too little."""
        needed = sum(tensor.nbytes for tensor in tensors)
        if needed > (free := free_on_host(needed)):
            raise FailedPrecondition(
                f"a copy of the weights takes {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are"
                " free; end other programs, or sleep at level 2, which keeps no copy"
            )
        self._tensors = tensors
        self._pieces = [empty_on_host(piece.shape, torch.uint8, piece.device) for piece in _split(tensors)]

    def read(self) -> None:
        """Copy the tensors to the host."""
        for piece, part in zip(self._pieces, _split(self._tensors), strict=True):
            piece.copy_(part, non_blocking=True)
        _synchronize(self._tensors)

    def write(self) -> None:
        """Copy the values on the host to the tensors."""
        for piece, part in zip(self._pieces, _split(self._tensors), strict=True):
            part.copy_(piece, non_blocking=True)
        _synchronize(self._tensors)


def _split(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield from tensor.split(_PIECE)


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor in host memory for copies to and from ``device``, without content.

    For CUDA the memory is pinned, if the system allows it. Pinning takes seconds, so torch keeps the memory of deleted
    tensors for later ones.
    """
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError:  # too little memory may be locked
            pass
    return torch.empty(shape, dtype=dtype)


def free_on_host(needed: int) -> int:
    """Return the free memory of the host in bytes.

    If it is less than ``needed``, torch first gives back the pinned memory of deleted tensors.
    """
    free = available_memory()
    if needed > free and torch.cuda.is_initialized():
        torch._C._host_emptyCache()
        free = available_memory()
    return free


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    if tensors and tensors[0].device.type == "cuda":
        torch.cuda.synchronize(tensors[0].device)
