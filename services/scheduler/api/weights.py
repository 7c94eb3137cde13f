"""Updates of the weights of a replica."""

import asyncio
import time
import uuid
from typing import NamedTuple

import structlog

from services.common.boundaries import undo_on_error_async
from services.common.errors import FailedPrecondition, InvalidRequest, TokaError, Unavailable
from services.scheduler.api.hub import Hub
from services.scheduler.core.request import PauseMode
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.stream import WorkerStream
from services.scheduler.workers.weights import Update
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import control_pb2

log = structlog.get_logger(__name__)

VERSION_CHARACTERS = 256


class _Staged(NamedTuple):
    """An update that the workers of ``stream`` have staged."""

    update: Update
    stream: WorkerStream


class WeightUpdates:
    """Stages and commits updates, one at a time. Used on the event loop."""

    def __init__(self, hub: Hub, link: WorkerLink) -> None:
        self._hub = hub
        self._link = link
        self._changing = asyncio.Lock()  # held while an update is staged, committed or discarded
        self._staged: _Staged | None = None
        self._discarding: set[asyncio.Task[None]] = set()  # a task without a reference may be collected
        # Held while workers write weights. Generation is not resumed meanwhile, and no other pause is requested.
        self.committing = asyncio.Lock()

    async def stage(self, directory: str, version: str) -> control_pb2.StageWeightsResponse:
        """Stage the weights in ``directory`` on all workers. Raises ``TokaError``; then none is staged.

        If the caller is cancelled, they are forgotten as soon as they have been read.
        """
        if not 1 <= len(version) <= VERSION_CHARACTERS:
            raise InvalidRequest(f"expected 1 to {VERSION_CHARACTERS} characters", field="version")
        update = Update(uuid.uuid4().hex, version, directory)
        staging = asyncio.create_task(self._stage(update))
        async with undo_on_error_async(self._forget_later, update):
            size = await asyncio.shield(staging)
        return control_pb2.StageWeightsResponse(update_id=update.update_id, bytes=size)

    async def commit(self, update_id: str, mode: PauseMode, *, recompute: bool) -> control_pb2.CommitWeightsResponse:
        """Commit a staged update between two steps. Raises ``TokaError``.

        If the caller is cancelled, the commit continues.
        """
        return await asyncio.shield(asyncio.create_task(self._commit(update_id, mode, recompute=recompute)))

    async def discard(self, update_id: str) -> None:
        """Forget a staged update."""
        async with self._changing:
            if self._staged is not None and self._staged.update.update_id == update_id:
                self._staged = None
                await self._forget(update_id)

    async def read(self, *, checksums: bool) -> control_pb2.GetWeightsResponse:
        """Return the weights of the replica, and the checksums of each rank. Raises ``TokaError``."""
        stream = self._connected()
        ranks = await asyncio.to_thread(stream.weights.read, checksums=checksums)
        response = control_pb2.GetWeightsResponse(weights=next(iter(ranks.values())).weights)
        for address, rank in ranks.items():
            response.ranks.add(address=address, tensors=rank.checksums)
        return response

    async def _stage(self, update: Update) -> int:
        """Stage ``update``. Return its bytes."""
        async with self._changing:
            self._staged, stream = None, self._connected()
            _, size = await asyncio.to_thread(stream.weights.stage, update)
            self._staged = _Staged(update, stream)
        log.info("weights staged", version=update.version, directory=update.directory, bytes=size)
        return size

    async def _forget_later(self, update: Update) -> None:
        """Discard ``update`` when it has been staged. Its caller has left."""
        task = asyncio.create_task(self.discard(update.update_id))  # it takes the lock after the task that stages it
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def _forget(self, update_id: str) -> None:
        """Make the connected workers forget an update."""
        if (stream := self._link.stream) is not None:
            await asyncio.to_thread(stream.weights.discard, update_id)

    async def _commit(self, update_id: str, mode: PauseMode, *, recompute: bool) -> control_pb2.CommitWeightsResponse:
        async with self._changing:
            staged, engine = self._staged, self._hub.engine
            if staged is None or staged.update.update_id != update_id:
                raise FailedPrecondition(
                    f"the update {update_id[:64]!r} is not staged: it was committed or discarded, or another update was"
                    " staged after it; stage it again",
                    field="update_id",
                )
            self._staged = None
            async with undo_on_error_async(self._forget, update_id):
                pause = await asyncio.wrap_future(engine.pause(mode, recompute=recompute, join=True))
                began_ns = time.perf_counter_ns()
                try:
                    async with self.committing:
                        weights = await self._write(staged)
                finally:
                    resuming = engine.resume(pause.number)
                await asyncio.wrap_future(resuming)
        paused_ns = 0 if pause.joined else time.perf_counter_ns() - began_ns
        log.info("weights committed", version=weights.version, paused_ms=round(paused_ns * 1e-6))
        return control_pb2.CommitWeightsResponse(weights=weights, aborted_samples=pause.aborted, paused_ns=paused_ns)

    async def _write(self, staged: _Staged) -> weights_pb2.Weights:
        """Write staged weights on all workers, while the core is paused."""
        if not await self._hub.ask(lambda core: core.is_paused):
            raise FailedPrecondition("generation was resumed before the commit; stage the update again")
        if self._link.stream is not staged.stream:
            raise Unavailable("a worker was lost after the update was staged; stage it again")
        try:
            weights = await asyncio.to_thread(staged.stream.weights.commit, staged.update.update_id)
        except TokaError:
            staged.stream.end()  # a new connection makes the weights of all workers equal
            raise
        self._link.committed = weights
        await asyncio.wrap_future(self._hub.engine.change_weights(weights))
        return weights

    def _connected(self) -> WorkerStream:
        if (stream := self._link.stream) is None:
            raise Unavailable("no worker is connected; try again")
        return stream
