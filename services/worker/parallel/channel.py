"""Transfers of tensors from one rank to another, in order and without copies. Owned by the compute thread.

Both ranks know all shapes from the plans, so no metadata is sent. On CUDA, a connected sender or receiver never blocks
the host: only the launches on the current stream wait.
"""

import contextlib
from collections import deque

import torch
import torch.distributed as dist

from services.worker.parallel.errors import lost_peer


class Sender:
    """The sending end of a channel. At most ``limit`` tensors are in transit; a further send waits for the oldest."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, limit: int) -> None:
        """``group``: the two ranks. ``peer``: the receiver's rank in it. ``name``: the receiver's name in errors."""
        self._group, self._peer, self._name, self._limit = group, peer, name, limit
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def connect(self, device: torch.device) -> None:
        """Connect to the receiver, which must call ``connect`` as well."""
        self.send(torch.zeros(1, device=device))
        self.drain()

    def send(self, tensor: torch.Tensor) -> None:
        """Send ``tensor``, which must have elements and not change later. On CUDA, the current stream sends it."""
        tensor = tensor.contiguous()
        with lost_peer(self._name):
            self._sent.append((dist.isend(tensor, group=self._group, group_dst=self._peer), tensor))
        while len(self._sent) > self._limit:
            self._wait()

    def drain(self) -> None:
        """Wait until all sent tensors are received."""
        while self._sent:
            self._wait()

    def _wait(self) -> None:
        # On CUDA, the current stream waits, so that the memory of the tensor is not reused before it is sent.
        work, _ = self._sent.popleft()
        with lost_peer(self._name):
            work.wait()  # type: ignore[union-attr]  # None only for ranks outside the group


class Receiver:
    """The receiving end of a channel.

    A receive is launched only when its tensor is needed. On CUDA, loading a kernel and allocating memory block the host
    until all launched work is done. So the device must not wait for a tensor that the sender will send much later.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, device: torch.device) -> None:
        """``device``: where tensors are received; the rest as in ``Sender``, with the roles exchanged."""
        self._group, self._peer, self._name, self._device = group, peer, name, device
        # On its own stream, a receive does not wait for earlier launches, and overlaps with them.
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def connect(self) -> None:
        """Connect to the sender, which must call ``connect`` as well."""
        self.receive((1,), torch.float32)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Wait for the next tensor, which must have this shape and dtype, and return it."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            with lost_peer(self._name):
                work = dist.irecv(tensor, group=self._group, group_src=self._peer)
        with lost_peer(self._name):
            work.wait()  # type: ignore[union-attr]  # None only for ranks outside the group
        if self._stream is not None:  # the memory was allocated on the other stream
            tensor.record_stream(torch.cuda.current_stream())
        return tensor
