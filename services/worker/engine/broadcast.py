"""Weights that a trainer broadcasts to this worker."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from services.common.errors import FailedPrecondition
from services.common.model.checkpoint_files import StoredTensor
from services.worker.boot.common import Loaded
from services.worker.engine.uploads import Uploads
from services.worker.models.base import Staged
from services.worker.models.received import ReceivedTensors
from services.worker.parallel.update_group import GroupAddress, UpdateGroup

log = structlog.get_logger(__name__)

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass
class _Update:
    """An update whose tensors are arriving."""

    update_id: str
    group: UpdateGroup
    tensors: ReceivedTensors
    files: dict[str, str] = field(default_factory=dict)  # file name of each tensor
    calls: int = 0


class Broadcasts:
    """The groups of this worker with trainers, and the tensors that it has received. Any thread may call."""

    def __init__(self, loaded: Loaded, uploads: Uploads) -> None:
        """Start without a group. ``uploads`` writes the received tensors of updates that were prepared there."""
        self._loaded, self._uploads = loaded, uploads
        self._lock = threading.Lock()  # protects the next two fields
        self._groups: dict[str, UpdateGroup] = {}
        self._update: _Update | None = None

    def join(self, address: GroupAddress) -> UpdateGroup:
        """Leave the group of this name, if there is one, join a new one, and return it.

        Raises ``InvalidRequest``, and ``Unavailable`` if it does not form in time.
        """
        address.check(self._loaded.model.device)
        self.leave(address.name)
        group = UpdateGroup(address, self._loaded.model.device)
        with self._lock:
            previous = self._groups.pop(address.name, None)  # another call has joined meanwhile
            self._groups[address.name] = group
        if previous is not None:
            self._close(previous)
        log.info("joined a trainer", group=address.name, backend=address.backend, rank=address.rank)
        return group

    def leave(self, name: str) -> bool:
        """Close a group, and forget the tensors that were received through it. Return False for an unknown name."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            self._close(group)
            log.info("left a trainer", group=name)
        return group is not None

    def abandon(self, group: UpdateGroup) -> None:
        """Close ``group`` as ``leave`` does, unless it was closed before."""
        with self._lock:
            known = self._groups.get(group.address.name) is group
            if known:
                del self._groups[group.address.name]
        if known:
            self._close(group)

    def find(self, name: str) -> UpdateGroup:
        """Return a group. Raises ``FailedPrecondition`` for an unknown name."""
        with self._lock:
            if (group := self._groups.get(name)) is None:
                raise FailedPrecondition(
                    f"this worker is in no group {name[:128]!r}: it left the group after an error, or has restarted;"
                    " join a new group",
                    field="group",
                )
        return group

    def receive(
        self, update_id: str, group: UpdateGroup, tensors: Mapping[str, StoredTensor], *, flat: bool
    ) -> list[str]:
        """Receive ``tensors``, by name, in their order. Return the names of the model's tensors that are missing.

        Raises ``InvalidRequest``, which names the tensor, ``FailedPrecondition``, and ``Unavailable`` if a process of
        the group is lost. The caller must then abandon the group.
        """
        with group.exclusive(), group.stream():
            update = self._continue(update_id, group)
            update.tensors.check(tensors)
            update.calls += 1
            with ExitStack() as stack:
                file = None
                if tensors and self._uploads.owns(update_id):
                    name = f"model-{update.calls:05}.safetensors"
                    file = stack.enter_context(self._uploads.writing(update_id, name, tensors))
                    update.files |= dict.fromkeys(tensors, name)
                for name, tensor in _arriving(group, tensors, flat=flat):
                    host = update.tensors.add(name, tensors[name], tensor)
                    if file is not None and host.numel():
                        file.write(name, 0, _content(host))
        return update.tensors.missing

    def take(self, update_id: str) -> Staged | None:
        """Return the received weights of an update, and forget them here. Return None if it was not received.

        Raises ``InvalidRequest``, which names a tensor that is missing.
        """
        with self._lock:
            update = self._update
            if update is None or update.update_id != update_id:
                return None
            self._update = None
        staged = update.tensors.staged()
        if self._uploads.owns(update_id):
            self._uploads.write_index(update_id, update.files)
        return staged

    def forget(self, update_id: str | None = None) -> None:
        """Forget the received tensors of an update, or of any update."""
        with self._lock:
            if self._update is not None and update_id in (None, self._update.update_id):
                self._update = None

    def _continue(self, update_id: str, group: UpdateGroup) -> _Update:
        """Return the update, which begins if another one was received before."""
        with self._lock:
            if self._update is None or self._update.update_id != update_id or self._update.group is not group:
                self._update = _Update(update_id, group, self._loaded.source.receive(self._loaded.model))
            return self._update

    def _close(self, group: UpdateGroup) -> None:
        group.close()
        with self._lock:
            if self._update is not None and self._update.group is group:
                self._update = None


def _arriving(
    group: UpdateGroup, tensors: Mapping[str, StoredTensor], *, flat: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each of ``tensors`` when it has arrived."""
    if not flat:
        for name, stored in tensors.items():
            yield name, group.receive(stored.shape, _DTYPES[stored.dtype])
    elif tensors:
        content, at = group.receive((sum(each.nbytes for each in tensors.values()),), torch.uint8), 0
        for name, stored in tensors.items():
            part = content[at : at + stored.nbytes].clone()  # aligned, unlike the slice
            yield name, part.view(_DTYPES[stored.dtype]).reshape(stored.shape)
            at += stored.nbytes


def _content(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()  # not typed as a buffer
    return memoryview(content)
