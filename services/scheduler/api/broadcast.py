"""Updates of the weights of a replica that a trainer broadcasts to its workers, or shares with them."""

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass

import structlog

from services.common.boundaries import undo_on_error_async
from services.common.errors import FailedPrecondition, InvalidRequest, Unavailable
from services.scheduler.api.weights import WeightUpdates, check_version
from services.scheduler.workers.broadcast import BroadcastCalls
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.stream import WorkerStream
from services.scheduler.workers.weights import Update
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import broadcast_pb2, control_pb2, shared_weights_pb2
from tokasaurus.worker.v1 import broadcast_pb2 as worker_broadcast_pb2
from tokasaurus.worker.v1 import shared_weights_pb2 as worker_shared_pb2

log = structlog.get_logger(__name__)


@dataclass
class _OpenUpdate:
    """An update whose tensors the workers of ``stream`` receive."""

    update_id: str
    group: str | None  # None: tensors come from shared memory
    stream: WorkerStream
    version: str = ""  # empty: not known yet


class BroadcastUpdates:
    """Receives one update at a time. Used on the event loop."""

    def __init__(self, link: WorkerLink, updates: WeightUpdates, workers: BroadcastCalls) -> None:
        self._link, self._updates, self._workers = link, updates, workers
        self._receiving = asyncio.Lock()  # held while workers receive tensors or stage them
        self._open: _OpenUpdate | None = None
        self._leaving: set[asyncio.Task[bool]] = set()
        self._ended: Counter[str] = Counter()  # number of groups of each name that have ended

    async def join(self, group: weights_pb2.UpdateGroup) -> None:
        """Make all workers join ``group``. Raises ``TokaError``; then none is in it."""
        await self.leave(group.name)
        await self._wait_until_left()
        async with undo_on_error_async(self._close, group.name, self._ended[group.name]):
            await self._workers.join(group)
        log.info("the workers joined a trainer", group=group.name, first_rank=group.first_rank, size=group.world_size)

    async def leave(self, name: str) -> bool:
        """Make all workers leave a group, even if the caller is cancelled. Return whether one was in it."""
        self._ended[name] += 1
        opened = self._open
        if opened is not None and opened.group == name:
            self._open = None
        leaving = asyncio.create_task(self._leave(name, opened))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return await asyncio.shield(leaving)

    async def receive(
        self, request: broadcast_pb2.ReceiveWeightsRequest
    ) -> worker_broadcast_pb2.ReceiveWeightsResponse:
        """Make all workers receive tensors of the open update.

        Raises ``TokaError``. Then, and if the caller is cancelled, the update is forgotten and the group is closed.
        """
        ended = self._ended[request.group]
        async with undo_on_error_async(self._close, request.group, ended), self._receiving:
            if self._ended[request.group] != ended:
                raise FailedPrecondition(
                    f"the group {request.group[:128]!r} was closed after an error, or left; join a new group",
                    field="group",
                )
            await self._wait_until_left()
            opened = await self._continue(request.group, request)
            return await self._workers.receive(opened.update_id, request.group, request.tensors, flat=request.flat)

    async def copy(
        self, request: shared_weights_pb2.CopySharedWeightsRequest
    ) -> worker_shared_pb2.CopySharedWeightsResponse:
        """Make all workers copy tensors of the open update out of shared memory.

        Raises ``TokaError``. Then, and if the caller is cancelled, the update is forgotten.
        """
        async with self._receiving, undo_on_error_async(self._forget_shared):
            opened = await self._continue(None, request)
            return await self._workers.copy(opened.update_id, request.allocations, request.tensors)

    async def stage(self, version: str) -> control_pb2.StageWeightsResponse:
        """Stage the open update, which ends. Raises ``TokaError``; then nothing is staged."""
        check_version(version, "version")
        async with self._receiving:
            opened, self._open = self._open, None
            if opened is None:
                raise FailedPrecondition(
                    "no tensors were received: an error has ended their update, or they were staged before; receive"
                    " all of them again",
                    field="received",
                )
            return await self._updates.stage_received(Update(opened.update_id, version, directory=""), opened.stream)

    async def _continue(
        self,
        group: str | None,
        request: broadcast_pb2.ReceiveWeightsRequest | shared_weights_pb2.CopySharedWeightsRequest,
    ) -> _OpenUpdate:
        """Return the open update, or begin one."""
        if request.version:
            check_version(request.version, "version")
        opened = self._open
        if opened is not None and opened.group == group and request.begin:
            await self._forget(opened)
            opened = None
        if opened is None:
            if (stream := self._link.stream) is None:
                raise Unavailable("no worker is connected; try again")
            opened = self._open = _OpenUpdate(uuid.uuid4().hex, group, stream, request.version)
            await self._workers.prepare(opened.update_id)
        if opened.group != group:
            raise _unfinished(opened)
        if opened.stream is not self._link.stream:
            first = "" if group is None else "join a new group, and "
            raise Unavailable(f"a worker was lost since the update began; {first}repeat it")
        if request.version not in ("", opened.version) and opened.version:
            raise InvalidRequest(
                f"{request.version!r}, but the tensors before are of {opened.version!r}; send one version at a time",
                field="version",
            )
        opened.version = request.version or opened.version
        return opened

    async def _close(self, name: str, ended: int) -> None:
        """Make all workers leave a group, because its trainer may have sent tensors that no worker has received.

        ``ended``: number of groups of this name that had ended before. A later group is not affected.
        """
        if self._ended[name] == ended:
            await self.leave(name)

    async def _wait_until_left(self) -> None:
        """Wait until no worker is leaving a group, which could be a new one of the same name."""
        while self._leaving:
            await asyncio.wait(set(self._leaving))

    async def _leave(self, name: str, opened: _OpenUpdate | None) -> bool:
        if opened is not None and opened.group == name:
            await self._forget(opened)
        return await self._workers.leave(name)

    async def _forget_shared(self) -> None:
        """Forget the open update if its tensors come from shared memory."""
        if (opened := self._open) is not None and opened.group is None:
            await self._forget(opened)

    async def _forget(self, opened: _OpenUpdate) -> None:
        if self._open is opened:
            self._open = None
        await self._updates.forget_later(Update(opened.update_id, opened.version, directory=""))


def _unfinished(opened: _OpenUpdate) -> FailedPrecondition:
    if opened.group is None:
        return FailedPrecondition(
            "an update from shared memory is unfinished; stage it first: if tensors are missing, this forgets it"
        )
    return FailedPrecondition(
        f"an update by the group {opened.group!r} is unfinished; finish it, or leave that group", field="group"
    )
