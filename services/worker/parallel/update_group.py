"""A process group with a trainer, which broadcasts weights. It is independent of the groups of the replica's ranks."""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not say that it exports them
    BroadcastOptions,
    PrefixStore,
    TCPStore,
)

from services.common.errors import FailedPrecondition, InvalidRequest, Unavailable
from services.common.host.resources import available_memory
from services.common.request_bounds import MAX_GROUP_HOST, MAX_GROUP_NAME, MAX_GROUP_RANKS, MAX_GROUP_SECONDS
from services.worker.parallel.errors import first_sentence

BACKENDS = ("gloo", "nccl")
_MOST_PORT = 65535
_PROBE_S, _CONNECT_S = 0.05, 1.0
_POLL_S = 0.0005
_UNSENT = 0xFF  # byte of elements that were not received: NaN in every dtype of weights
# With another value, torch ends this process if the trainer is lost. Read when a group is made.
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GroupAddress(NamedTuple):
    """The rendezvous address of a process group, and the rank of this process."""

    name: str
    backend: str  # a member of ``BACKENDS``
    host: str  # of the trainer's store
    port: int
    rank: int
    world_size: int
    timeout_s: float  # longest time to form the group, and to wait for a tensor

    def check(self, device: torch.device) -> None:
        """Raise ``InvalidRequest``, which names the field, if no group can be made. ``device``: that of the model."""
        if not 1 <= len(self.name) <= MAX_GROUP_NAME:
            raise InvalidRequest(f"expected 1 to {MAX_GROUP_NAME} characters", field="group.name")
        if self.backend not in BACKENDS or (self.backend == "nccl" and device.type != "cuda"):
            expected = " or ".join(BACKENDS) if device.type == "cuda" else "gloo, because this worker has no GPU"
            raise InvalidRequest(f"{self.backend[:64]!r}: expected {expected}", field="group.backend")
        if not 1 <= len(self.host) <= MAX_GROUP_HOST or not _is_host(self.host):
            raise InvalidRequest("expected the host of the trainer's store", field="group.master_address")
        if not 1 <= self.port <= _MOST_PORT:
            raise InvalidRequest(f"{self.port}: expected 1 to {_MOST_PORT}", field="group.master_port")
        if not 1 <= self.rank < self.world_size:
            raise InvalidRequest(
                f"this worker would have rank {self.rank} of {self.world_size} processes: expected 1 to"
                f" {self.world_size - 1}, because the trainer has rank 0 and each worker its own rank",
                field="group.world_size",
            )
        if self.world_size > MAX_GROUP_RANKS:
            raise InvalidRequest(
                f"{self.world_size} processes: expected at most {MAX_GROUP_RANKS}", field="group.world_size"
            )
        if not 0 < self.timeout_s <= MAX_GROUP_SECONDS:
            raise InvalidRequest(
                f"{self.timeout_s:g} s: expected more than 0, and at most {MAX_GROUP_SECONDS} s",
                field="group.timeout_ns",
            )


def _is_host(host: str) -> bool:
    """Return whether ``host`` can be looked up. Python raises ``UnicodeError`` for other names."""
    try:
        return bool(host.encode("idna")) and "\0" not in host
    except UnicodeError:
        return False


class UpdateGroup:
    """The connections of this process to a trainer with rank 0, and to the other ranks.

    One thread at a time calls ``receive``, in the block of ``exclusive``. Any thread calls ``close``.
    """

    def __init__(self, address: GroupAddress, device: torch.device) -> None:
        """Wait until all processes have joined. With nccl, wait until the trainer's store listens.

        ``device`` is that of the model. Raises ``Unavailable`` if a process does not join in time.
        """
        self.address = address
        self._receiving = threading.Lock()  # held by the thread that receives
        self._device = device if address.backend == "nccl" else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._closed = False
        deadline = time.monotonic() + address.timeout_s
        try:
            own_host = _wait_for_store(address, deadline)
            left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            # The store counts its clients, and the trainer may wait until all have connected.
            store = TCPStore(address.host, address.port, address.world_size, is_master=False, timeout=left)
            make = _make_nccl if address.backend == "nccl" else _make_gloo
            self._group: Any = make(address, store, own_host, left)  # it keeps the store
        except (RuntimeError, OSError) as error:
            raise Unavailable(
                f"the group {address.name!r} of {address.world_size} processes did not form at"
                f" {address.host}:{address.port} within {address.timeout_s:g} s: {first_sentence(error)}; start all of"
                " its processes with the same world_size, each with its own rank, and join again"
            ) from error

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run the block. Raises ``FailedPrecondition`` if another thread is in it, because tensors have an order."""
        if not self._receiving.acquire(blocking=False):
            raise FailedPrecondition(
                f"another call receives from the group {self.address.name!r}; send one call after the other",
                field="group",
            )
        try:
            yield
        finally:
            self._receiving.release()

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which tensors are received and used. On CUDA, steps do not wait for its launches."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Wait for the next tensor that rank 0 broadcasts, and return it, on the device of the backend.

        Call it in the context of ``stream``. Elements that rank 0 did not send are NaN. Raises ``Unavailable`` if a
        process is lost, if no tensor arrives in time, or if the group was closed. Raises ``FailedPrecondition`` if
        there is too little memory for the tensor.
        """
        tensor = self._empty(shape, dtype)
        content = tensor.reshape(-1).view(torch.uint8)  # Gloo cannot broadcast every dtype
        content.fill_(_UNSENT)
        # If ``close`` ended the last reference, torch would wait there for the broadcast, and hold Python's lock.
        group, work = self._group, None
        if group is None:
            raise self._lost("it was closed")
        try:
            options = BroadcastOptions()
            options.timeout = timedelta(seconds=self.address.timeout_s)
            work = group.broadcast([content], options)
            if self.address.backend == "nccl":
                self._wait(work)
            work.wait()
        except RuntimeError as error:
            raise self._lost(first_sentence(error)) from error
        finally:
            del group, work  # the traceback of an error would keep the connections
        if self._closed:
            raise self._lost("it was closed")
        return tensor

    def close(self) -> None:
        """Close the connections. The other processes get errors.

        A ``receive`` that waits fails at once with nccl, and after the timeout at the latest with gloo.
        """
        self._closed = True
        group, self._group = self._group, None
        if group is not None and self.address.backend == "nccl":
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without content. Raises ``FailedPrecondition`` if there is too little memory."""
        size = math.prod(shape) * dtype.itemsize
        try:
            if self._device.type == "cpu" and size > available_memory():
                raise MemoryError
            return torch.empty(shape, dtype=dtype, device=self._device)
        except (MemoryError, RuntimeError) as error:
            raise FailedPrecondition(
                f"{self._device} has too little memory to receive a tensor of {size:,} bytes; send smaller tensors, or"
                " end other programs"
            ) from error

    def _wait(self, work: Any) -> None:
        """Wait until the device has received a tensor. A wait of torch would block the host without a timeout."""
        deadline = time.monotonic() + self.address.timeout_s
        while not work.is_completed():
            if self._closed:
                raise self._lost("it was closed")
            if time.monotonic() > deadline:
                raise self._lost(f"no tensor arrived within {self.address.timeout_s:g} s")
            time.sleep(_POLL_S)

    def _lost(self, reason: str) -> Unavailable:
        return Unavailable(
            f"the group {self.address.name!r} cannot be used any more ({reason}): join a new group, and repeat the"
            " update"
        )


def _wait_for_store(address: GroupAddress, deadline: float) -> str:
    """Wait until the trainer's store listens. Return the address of this host that the trainer's host can reach."""
    while True:
        try:
            with socket.create_connection((address.host, address.port), timeout=_CONNECT_S) as connection:
                host: str = connection.getsockname()[0]
                return host
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PROBE_S)


def _store(address: GroupAddress, store: TCPStore, device: str) -> PrefixStore:
    """Return the store of a group that the trainer makes with torch, which adds these prefixes."""
    return PrefixStore(f"{device}/", PrefixStore(f"{address.name}/", PrefixStore(address.name, store)))


def _make_gloo(address: GroupAddress, store: TCPStore, own_host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  the only class that takes devices
    options._timeout = timeout  # noqa: SLF001
    # The default device has the address to which the host's name resolves, which the trainer may not reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]  # noqa: SLF001
    return dist.ProcessGroupGloo(_store(address, store, "cpu"), address.rank, address.world_size, options)


def _make_nccl(address: GroupAddress, store: TCPStore, own_host: str, timeout: timedelta) -> Any:
    """Return a group whose processes connect at the first broadcast."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    with _environment(_ASYNC_ERRORS, "0"):
        return dist.ProcessGroupNCCL(_store(address, store, "cuda"), address.rank, address.world_size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
