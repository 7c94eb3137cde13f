"""Tensors from one rank to another, in order, without a copy on the way. Owned by the compute thread.

What is sent and received follows from the plans, which all ranks have: shapes are known, and nothing is negotiated.
"""

from collections import deque

import torch
import torch.distributed as dist

from services.worker.parallel.errors import lost_peer


class Sender:
    """Sends do not hold up computing: at most ``most`` of them, with their tensors, are on their way at once."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, most: int) -> None:
        """``group``: of the two. ``peer``: its number there; ``name``: as messages call it."""
        self._group, self._peer, self._name, self._most = group, peer, name, most
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """``tensor``, which has elements, must not change any more."""
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
        work, _ = self._sent.popleft()
        with lost_peer(self._name):
            work.wait()


class Receiver:
    """Room is made ahead, so that data arrive while others are computed with."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str) -> None:
        """As of ``Sender``."""
        self._group, self._peer, self._name = group, peer, name
        self._expected: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """The next that is sent and not yet expected is of this shape and dtype."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        with lost_peer(self._name):
            self._expected.append((dist.irecv(tensor, group=self._group, group_src=self._peer), tensor))

    def take(self) -> torch.Tensor:
        """The oldest that is expected; waits for it. It is the caller's."""
        work, tensor = self._expected.popleft()
        with lost_peer(self._name):
            work.wait()
        return tensor

    def drain(self) -> None:
        """Wait for all that is expected, and drop it."""
        while self._expected:
            self.take()
