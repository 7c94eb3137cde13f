"""Results of one step on their way to the host."""

from typing import overload

import torch


@overload
def to_host(tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def to_host(tensor: None) -> None: ...


def to_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in pinned memory, complete when the current stream has come so far."""
    if tensor is None:
        return None
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)
