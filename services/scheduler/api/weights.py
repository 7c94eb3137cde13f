"""Updates of the weights of a replica."""

import asyncio
import time
import uuid
from typing import NamedTuple

import structlog

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
        # Held while workers write weights. Generation is not resumed meanwhile.
        self.committing = asyncio.Lock()

    async def stage(self, directory: str, version: str) -> control_pb2.StageWeightsResponse:
        """Stage the weights in ``directory`` on all workers. Raises ``TokaError``; then none is staged."""
        if not 1 <= len(version) <= VERSION_CHARACTERS:
            raise InvalidRequest(f"expected 1 to {VERSION_CHARACTERS} characters", field="version")
        async with self._changing:
            self._staged, stream = None, self._connected()
            update = Update(uuid.uuid4().hex, version, directory)
            _, size = await asyncio.to_thread(stream.weights.stage, update)
            self._staged = _Staged(update, stream)
        log.info("weights staged", version=version, directory=directory, bytes=size)
        return control_pb2.StageWeightsResponse(update_id=update.update_id, bytes=size)

    async def commit(self, update_id: str, mode: PauseMode, *, recompute: bool) -> control_pb2.CommitWeightsResponse:
        """Commit a staged update between two steps. Raises ``TokaError``.

        If the caller is cancelled, the commit continues.
        """
        return await asyncio.shield(asyncio.create_task(self._commit(update_id, mode, recompute=recompute)))

    async def discard(self, update_id: str) -> None:
        """Forget a staged update."""
        async with self._changing:
            staged = self._staged
            if staged is not None and staged.update.update_id == update_id:
                self._staged = None
                await asyncio.to_thread(staged.stream.weights.discard, update_id)

    async def read(self, *, checksums: bool) -> control_pb2.GetWeightsResponse:
        """Return the weights of the replica, and the checksums of each rank. Raises ``TokaError``."""
        stream = self._connected()
        ranks = await asyncio.to_thread(stream.weights.read, checksums=checksums)
        response = control_pb2.GetWeightsResponse(weights=next(iter(ranks.values())).weights)
        for address, rank in ranks.items():
            response.ranks.add(address=address, tensors=rank.checksums)
        return response

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
            was_paused = await self._hub.ask(lambda core: core.state.queue.pause is not None)
            pausing = engine.pause(None if was_paused else mode, recompute=recompute)
            aborted = await asyncio.wrap_future(pausing)
            began_ns = time.perf_counter_ns()
            try:
                async with self.committing:
                    weights = await self._write(staged)
            finally:
                if not was_paused:
                    await asyncio.wrap_future(engine.resume())
        paused_ns = 0 if was_paused else time.perf_counter_ns() - began_ns
        log.info("weights committed", version=weights.version, paused_ms=round(paused_ns * 1e-6))
        return control_pb2.CommitWeightsResponse(weights=weights, aborted_samples=aborted, paused_ns=paused_ns)

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
        await self._hub.ask(lambda core: core.change_weights(weights.version))
        return weights

    def _connected(self) -> WorkerStream:
        if (stream := self._link.stream) is None:
            raise Unavailable("no worker is connected; try again")
        return stream
