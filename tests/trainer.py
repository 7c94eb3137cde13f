"""A trainer that broadcasts weights: rank 0 of a process group, whose other ranks are workers."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from bench.server import free_port

Tensors = Mapping[str, torch.Tensor]
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


class Trainer:
    """Rank 0 of a group. Its methods return at once, and run one after the other in a thread."""

    def __init__(
        self,
        world_size: int,
        name: str = "weight_update_group",
        *,
        device: str = "cpu",
        port: int = 0,
        joins: bool = True,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        """Begin to form the group, unless ``joins`` is false. ``port`` 0: any free one.

        After ``timeout`` without a rank, the group has failed. ``close`` takes as long for a group that never forms.

        ``device`` is that of the tensors: with "cuda" the backend is nccl.
        """
        self.world_size, self.name, self.port = world_size, name, port or free_port()
        self._device, self._timeout = device, timeout
        self._thread = ThreadPoolExecutor(1)
        self.joined: Future[None] = self._thread.submit(self._join if joins else lambda: None)

    @property
    def address(self) -> dict[str, Any]:
        """The fields of a group that HTTP bodies and messages share."""
        return {"master_address": HOST, "master_port": self.port, "world_size": self.world_size}

    def send(self, tensors: Iterable[torch.Tensor]) -> "Future[None]":
        """Broadcast ``tensors`` in their order."""
        return self._thread.submit(self._send, list(tensors))

    def close(self) -> None:
        """Close the connections, after the calls before."""
        self._thread.submit(self._leave)
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _join(self) -> None:
        # Listens at once, and does not wait for the workers.
        self._store = dist.TCPStore(
            HOST, self.port, self.world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        prefix = "cuda/" if self._device == "cuda" else "cpu/"
        store = dist.PrefixStore(prefix, dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store)))
        if self._device == "cuda":
            self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, timeout=self._timeout)
        else:
            options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
            options._timeout = self._timeout  # noqa: SLF001
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001
            self._group = dist.ProcessGroupGloo(store, 0, self.world_size, options)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            content = tensor.to(self._device).contiguous().reshape(-1).view(torch.uint8)
            self._group.broadcast([content], dist.BroadcastOptions()).wait()

    def _leave(self) -> None:
        self._group = self._store = None
