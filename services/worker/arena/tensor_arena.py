"""Tensors in blocks of memory, which are given back and taken again together."""

import contextlib
from collections.abc import Iterable, Sequence

import torch

from services.worker.arena.block import Block, HostBlock

# Small tensors share blocks, because the device gives memory in pieces of 2 MiB.
_SHARED_BLOCK = 1 << 28
_ALIGNMENT = 512  # bytes


class TensorArena:
    """Tensors on ``device`` that are given back and taken again together. Their addresses never change."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Block] = []

    @property
    def contents(self) -> list[torch.Tensor]:
        """The blocks as tensors, each ``[size]`` uint8, whose sizes are multiples of 512."""
        return [block.tensor for block in self._blocks]

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return sum(content.nbytes for content in self.contents)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros in a block of its own. Raises ``MemoryError`` or ``torch.OutOfMemoryError``."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._add(size)[:size].view(dtype).view(*shape)

    @torch.no_grad()
    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move ``tensors``, which share no memory, into the arena. The objects stay, and their addresses change.

        Raises ``ValueError`` for a tensor that is not contiguous, ``MemoryError`` and ``torch.OutOfMemoryError``.
        """
        group: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"a tensor of shape {list(tensor.shape)} is not contiguous")
            group.append(tensor)
            size += _aligned(tensor.nbytes)
            if size >= _SHARED_BLOCK:
                self._move(group, size)
                group, size = [], 0
        self._move(group, size)

    def release(self) -> None:
        """Give all memory back."""
        for block in self._blocks:
            block.release()

    def restore(self) -> None:
        """Take memory again, with zeros. Raises ``torch.OutOfMemoryError``; then nothing has changed."""
        with contextlib.ExitStack() as undo:
            for block in self._blocks:
                block.restore()
                undo.callback(block.release)
            undo.pop_all()

    def _move(self, tensors: Sequence[torch.Tensor], size: int) -> None:
        if not size:
            return
        content, start = self._add(size), 0
        for tensor in tensors:
            moved = content[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            moved.copy_(tensor)
            tensor.data = moved
            start += _aligned(tensor.nbytes)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # so that there are no two copies of all tensors

    def _add(self, size: int) -> torch.Tensor:
        size = max(_ALIGNMENT, _aligned(size))
        if self.device.type == "cuda":
            from services.worker.arena.cuda_block import CudaBlock

            self._blocks.append(CudaBlock(size, self.device))
        else:
            self._blocks.append(HostBlock(size))
        return self._blocks[-1].tensor


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
