"""Weights that a trainer on this worker's host shares by CUDA IPC."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from services.common.errors import Cancelled, FailedPrecondition, InvalidRequest
from services.common.model.checkpoint_files import StoredTensor
from services.worker.arena.cuda_ipc import Gpu, SharedCopy, SharedMemory, gpu_of
from services.worker.arena.host_copy import empty_on_host
from services.worker.engine.arrivals import DTYPES, Arrivals


class SharedTensor(NamedTuple):
    """A tensor in memory of a trainer."""

    stored: StoredTensor
    copies: Sequence[SharedCopy]  # with the same values on different GPUs, at least one


class SharedWeights:
    """Copies tensors out of memory that a trainer shares. Any thread may call."""

    def __init__(self, device: torch.device, arrivals: Arrivals) -> None:
        """``device`` is that of the model. ``arrivals`` keeps the tensors."""
        self._device, self._arrivals = device, arrivals
        self._copying = threading.Lock()  # held while tensors are copied
        self._gpu: Gpu | None = None  # opened by the first call

    def copy(self, update_id: str, tensors: Mapping[str, SharedTensor], is_active: Callable[[], bool]) -> list[str]:
        """Copy ``tensors``, by name. Return the names of the model's tensors that have not arrived.

        The copies go straight to host memory, where new weights are checked and staged, so no memory of the device is
        needed. Raises ``InvalidRequest``, which names the tensor, ``FailedPrecondition``, and ``Cancelled`` as soon as
        ``is_active`` returns False.
        """
        with self._copying:
            self._gpu = self._gpu or gpu_of(self._device)
            if self._gpu is None:
                raise FailedPrecondition(
                    "this worker computes on a CPU, and CUDA IPC shares memory of GPUs; broadcast the weights with"
                    " gloo, upload them, or write them into a directory in memory"
                )
            described = {name: each.stored for name, each in tensors.items()}
            with SharedMemory(self._gpu) as memory:
                return self._arrivals.keep(update_id, self, described, self._read(memory, tensors, is_active))

    def _read(
        self, memory: SharedMemory, tensors: Mapping[str, SharedTensor], is_active: Callable[[], bool]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of each tensor."""
        for name, each in tensors.items():
            if not is_active():
                raise Cancelled("the caller has disconnected")
            try:
                host = self._copy_one(memory, each)
            except (InvalidRequest, FailedPrecondition) as error:
                raise type(error)(f"{name}: {error.message}", field="tensors") from error
            yield name, host

    def _copy_one(self, memory: SharedMemory, tensor: SharedTensor) -> torch.Tensor:
        """Return a tensor in host memory."""
        size = tensor.stored.nbytes
        address = memory.locate(tensor.copies, size) if size else 0
        try:
            host = empty_on_host(tensor.stored.shape, DTYPES[tensor.stored.dtype], self._device)
        except RuntimeError as error:
            raise FailedPrecondition(
                f"the host has too little memory for its {size:,} bytes; end other programs"
            ) from error
        if size:
            memory.copy_to_host(host, address)
        return host
