"""Tensors from one rank to another, in order, without a copy on the way. Owned by the compute thread.

What is sent and received follows from the plans, which all ranks have: shapes are known, and nothing is negotiated.

On CUDA nothing here waits on the host, once the two are connected: what is launched on the current stream does.
"""

import contextlib
from collections import deque

import torch
import torch.distributed as dist

from services.worker.parallel.errors import lost_peer


class Sender:
    """Sends do not hold up computing: at most ``most`` of them, with their tensors, are on their way at once."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, most: int) -> None:
        """``group``: of the two. ``peer``: its number there; ``name``: as messages call it."""
        self._group, self._peer, self._name, self._most = group, peer, name, most
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def connect(self, device: torch.device) -> None:
        """Find the receiver, which calls ``connect``, too."""
        self.send(torch.zeros(1, device=device))
        self.drain()

    def send(self, tensor: torch.Tensor) -> None:
        """``tensor``, which has elements, must not change any more. On CUDA it is sent when the current stream has come
        so far."""
        tensor = tensor.contiguous()
        with lost_peer(self._name):
            self._sent.append((dist.isend(tensor, group=self._group, group_dst=self._peer), tensor))
        while len(self._sent) > self._most:
            self._wait()

    def drain(self) -> None:
        """Wait until all that was sent is received."""
        while self._sent:
            self._wait()

    def _wait(self) -> None:
        # On CUDA the current stream waits, so that the tensor's memory is not written to before it is sent.
        work, _ = self._sent.popleft()
        with lost_peer(self._name):
            work.wait()  # type: ignore[union-attr]  # None only for ranks that are not of the group


class Receiver:
    """Nothing is asked for before it is needed: on CUDA, whatever waits for another rank also holds up the host where a
    kernel is loaded or memory is made, and so must not be what that rank will only do later."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, device: torch.device) -> None:
        """As of ``Sender``; ``device``: where tensors are wanted."""
        self._group, self._peer, self._name, self._device = group, peer, name, device
        # What is received waits for what was launched before it: on a stream of its own that is nothing, and it arrives
        # while the device computes what the host has launched ahead.
        self._beside = torch.cuda.Stream() if device.type == "cuda" else None

    def connect(self) -> None:
        """Find the sender, which calls ``connect``, too."""
        self.take((1,), torch.float32)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The oldest that was sent and not taken, which is of this shape and dtype; waits for it. It is the
        caller's."""
        with contextlib.nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            with lost_peer(self._name):
                work = dist.irecv(tensor, group=self._group, group_src=self._peer)
        with lost_peer(self._name):
            work.wait()  # type: ignore[union-attr]  # None only for ranks that are not of the group
        if self._beside is not None:  # its memory is of the other stream
            tensor.record_stream(torch.cuda.current_stream())
        return tensor
