"""Weights that a trainer broadcasts to this worker."""

import threading
from collections.abc import Iterator, Mapping

import structlog
import torch

from services.common.errors import FailedPrecondition
from services.common.model.checkpoint_files import StoredTensor
from services.worker.engine.arrivals import DTYPES, Arrivals
from services.worker.parallel.update_group import GroupAddress, UpdateGroup

log = structlog.get_logger(__name__)


class Broadcasts:
    """The groups of this worker with trainers. Any thread may call."""

    def __init__(self, device: torch.device, arrivals: Arrivals) -> None:
        """Start without a group. ``device`` is that of the model. ``arrivals`` keeps the received tensors."""
        self._device, self._arrivals = device, arrivals
        self._lock = threading.Lock()  # protects the next field
        self._groups: dict[str, UpdateGroup] = {}

    def join(self, address: GroupAddress) -> UpdateGroup:
        """Leave the group of this name, if there is one, join a new one, and return it.

        Raises ``InvalidRequest``, and ``Unavailable`` if it does not form in time.
        """
        address.check(self._device)
        self.leave(address.name)
        group = UpdateGroup(address, self._device)
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
            return self._arrivals.keep(update_id, group, tensors, _arriving(group, tensors, flat=flat))

    def _close(self, group: UpdateGroup) -> None:
        group.close()
        self._arrivals.forget_source(group)


def _arriving(
    group: UpdateGroup, tensors: Mapping[str, StoredTensor], *, flat: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each of ``tensors`` when it has arrived."""
    if not flat:
        for name, stored in tensors.items():
            yield name, group.receive(stored.shape, DTYPES[stored.dtype])
    elif tensors:
        content, at = group.receive((sum(each.nbytes for each in tensors.values()),), torch.uint8), 0
        for name, stored in tensors.items():
            part = content[at : at + stored.nbytes].clone()  # aligned, unlike the slice
            yield name, part.view(DTYPES[stored.dtype]).reshape(stored.shape)
            at += stored.nbytes
