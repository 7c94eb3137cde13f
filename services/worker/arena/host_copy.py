"""A copy of an arena in the memory of the host."""

from collections.abc import Iterator, Sequence

import torch

from services.common.errors import FailedPrecondition
from services.common.host.resources import available_memory

_PIECE = 1 << 28  # bytes; torch rounds pinned memory up to powers of two


class HostCopy:
    """Room for a copy of tensors, which are ``[size]`` uint8.

    On CUDA the memory is pinned, if the system allows it: copies from and to it are then several times faster.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate the memory. Any thread may call it. Raises ``FailedPrecondition`` if the host has too little."""
        needed, free = sum(tensor.nbytes for tensor in tensors), available_memory()
        if needed > free:
            raise FailedPrecondition(
                f"a copy of the weights takes {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are"
                " free; end other programs, or sleep at level 2, which keeps no copy"
            )
        self._tensors = tensors
        self._pieces = [_empty(piece) for piece in _split(tensors)]

    def read(self) -> None:
        """Copy the tensors to the host."""
        for piece, part in zip(self._pieces, _split(self._tensors), strict=True):
            piece.copy_(part, non_blocking=True)
        _synchronize(self._tensors)

    def write(self) -> None:
        """Copy the host's copy to the tensors."""
        for piece, part in zip(self._pieces, _split(self._tensors), strict=True):
            part.copy_(piece, non_blocking=True)
        _synchronize(self._tensors)


def _split(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield from tensor.split(_PIECE)


def _empty(like: torch.Tensor) -> torch.Tensor:
    if like.device.type == "cuda":
        try:
            return torch.empty(like.shape, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # too little memory may be locked
            pass
    return torch.empty(like.shape, dtype=torch.uint8)


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    if tensors and tensors[0].device.type == "cuda":
        torch.cuda.synchronize(tensors[0].device)
