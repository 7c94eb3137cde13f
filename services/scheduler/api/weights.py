"""Updates of the weights of a replica."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from services.common.boundaries import undo_on_error_async
from services.common.errors import FailedPrecondition, InvalidRequest, TokaError, Unavailable
from services.common.memory_parts import MemoryPart
from services.common.packed import fill
from services.common.request_bounds import MAX_WEIGHTS_VERSION
from services.common.rpc.channel import task_is_cancelled
from services.scheduler.api.hub import Hub
from services.scheduler.core.request import PauseMode
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.stream import WorkerStream
from services.scheduler.workers.upload import Uploader
from services.scheduler.workers.weights import Update
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import control_pb2, tensor_pb2

log = structlog.get_logger(__name__)


@dataclass
class _Staged:
    """An update that the workers of ``stream`` have staged."""

    update: Update
    stream: WorkerStream
    fingerprint: int
    commit_sent: bool = False  # if true, a worker may have committed it, and others may need its files


class WeightUpdates:
    """Stages and commits updates, one at a time. Used on the event loop."""

    def __init__(self, hub: Hub, link: WorkerLink, uploader: Uploader) -> None:
        self._hub = hub
        self._link = link
        self._uploader = uploader
        self._changing = asyncio.Lock()  # held while an update is staged, committed or discarded
        self._staged: _Staged | None = None
        self._discarding: set[asyncio.Task[None]] = set()  # a task without a reference may be collected
        # Held while workers write weights. Generation is not resumed meanwhile, and no other pause is requested.
        self.committing = asyncio.Lock()

    async def stage(self, directory: str, version: str) -> control_pb2.StageWeightsResponse:
        """Stage the weights in ``directory`` on all workers. Raises ``TokaError``; then none is staged.

        If the caller is cancelled, they are forgotten as soon as they have been read.
        """
        if not directory:
            raise InvalidRequest("expected an absolute path on the workers' hosts", field="directory")
        check_version(version, "version")
        update = Update(uuid.uuid4().hex, version, directory)
        async with undo_on_error_async(self.forget_later, update):
            return await self._stage_to_the_end(update)

    async def upload(
        self, requests: AsyncIterator[control_pb2.UploadWeightsRequest]
    ) -> control_pb2.StageWeightsResponse:
        """Send weights to all workers and stage them.

        Raises ``TokaError``, after the last of ``requests``. Then, and if the caller is cancelled, nothing is staged
        and the files are removed.
        """
        try:
            return await self._upload(requests)
        except TokaError:
            async for _ in requests:  # an asyncio client that still sends would lose the error (grpc/grpc#36066)
                pass
            raise

    async def stage_received(self, update: Update, stream: WorkerStream) -> control_pb2.StageWeightsResponse:
        """Stage weights that the workers of ``stream`` have received. Raises ``TokaError``; then they are forgotten."""
        async with undo_on_error_async(self.forget_later, update):
            return await self._stage_to_the_end(update, stream)

    async def commit(self, update_id: str, mode: PauseMode, *, recompute: bool) -> control_pb2.CommitWeightsResponse:
        """Commit a staged update between two steps. Raises ``TokaError``.

        If the caller is cancelled, the commit continues.
        """
        return await asyncio.shield(asyncio.create_task(self._commit(update_id, mode, recompute=recompute)))

    async def discard(self, update_id: str) -> None:
        """Forget a staged update."""
        async with self._changing:
            if (staged := self._staged) is not None and staged.update.update_id == update_id:
                self._staged = None
                await self._forget(staged.update)

    async def forget_later(self, update: Update) -> None:
        """Forget an update that failed or whose caller has left, when no other call changes weights."""
        await asyncio.shield(self._begin_forgetting(update))

    async def read(self, *, checksums: bool) -> control_pb2.GetWeightsResponse:
        """Return the weights of the replica, and the checksums of each rank. Raises ``TokaError``."""
        stream = self._connected()
        ranks = await asyncio.to_thread(stream.weights.read, checksums=checksums)
        response = control_pb2.GetWeightsResponse(weights=next(iter(ranks.values())).weights)
        for address, rank in ranks.items():
            response.ranks.add(address=address, tensors=rank.checksums)
        if (staged := self._staged) is not None and staged.stream is stream:
            update = staged.update
            response.staged.update_id, response.staged.version = update.update_id, update.version
            response.staged.fingerprint = staged.fingerprint
        return response

    async def read_tensor(self, name: str, rows: int) -> tensor_pb2.ReadTensorResponse:
        """Return the first ``rows`` rows of the checkpoint's tensor ``name``. Raises ``TokaError``."""
        values = await asyncio.to_thread(self._connected().weights.read_rows, name, rows)
        response = tensor_pb2.ReadTensorResponse(shape=values.shape)
        fill(response, "values", values.reshape(-1))
        return response

    async def _upload(
        self, requests: AsyncIterator[control_pb2.UploadWeightsRequest]
    ) -> control_pb2.StageWeightsResponse:
        header = await _read_header(requests)
        check_version(header.version, "header.version")
        update, stream = Update(uuid.uuid4().hex, header.version, directory=""), self._connected()
        async with undo_on_error_async(self.forget_later, update):
            await self._send(update, header, _read_chunks(requests), stream)
            return await self._stage_to_the_end(update, stream)

    async def _send(
        self,
        update: Update,
        header: control_pb2.UploadHeader,
        chunks: AsyncIterator[weights_pb2.TensorChunk],
        stream: WorkerStream,
    ) -> None:
        """Send an upload to the workers of ``stream``. Raises ``Unavailable`` if one is lost meanwhile."""
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(self._uploader.send(update.update_id, header.tensors, chunks))
        try:
            with stream.weights.cancelling(lambda: loop.call_soon_threadsafe(sending.cancel)):
                await sending
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise _lost() from None
        finally:
            sending.cancel()  # it would read ``chunks`` if the connection has ended before

    async def _stage_to_the_end(
        self, update: Update, stream: WorkerStream | None = None
    ) -> control_pb2.StageWeightsResponse:
        """Stage ``update``, even if the caller is cancelled meanwhile.

        ``stream``: the workers that received its upload, or None for an update from a directory.
        """
        return await asyncio.shield(asyncio.create_task(self._stage(update, stream)))

    async def _stage(self, update: Update, uploaded_to: WorkerStream | None) -> control_pb2.StageWeightsResponse:
        """Stage ``update``, and forget the update that was staged before."""
        async with self._changing:
            self._check_awake()  # before any replica commits an update that this one cannot commit
            replaced, self._staged, stream = self._staged, None, self._connected()
            if replaced is not None and replaced.update.uploaded:
                await self._forget(replaced.update)
            if uploaded_to not in (None, stream):
                raise _lost()
            fingerprint, size = await asyncio.to_thread(stream.weights.stage, update)
            self._staged = _Staged(update, stream, fingerprint)
        log.info("weights staged", version=update.version, directory=update.directory or "uploaded", bytes=size)
        return control_pb2.StageWeightsResponse(update_id=update.update_id, bytes=size, fingerprint=fingerprint)

    def _begin_forgetting(self, update: Update) -> asyncio.Task[None]:
        """Return a task that forgets ``update``. It takes the lock after the task that holds it or waits for it."""
        task = asyncio.create_task(self._forget_next(update))
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)
        return task

    async def _forget_next(self, update: Update) -> None:
        async with self._changing:
            if self._staged is not None and self._staged.update == update:
                self._staged = None
            await self._forget(update)

    async def _forget(self, update: Update, *, commit_sent: bool = False) -> None:
        """Make the connected workers forget an update, and remove its files unless a worker may need them."""
        if (stream := self._link.stream) is not None:
            remove_upload = update.uploaded and not commit_sent
            await asyncio.to_thread(stream.weights.discard, update.update_id, remove_upload=remove_upload)

    async def _commit(self, update_id: str, mode: PauseMode, *, recompute: bool) -> control_pb2.CommitWeightsResponse:
        async with self._changing:
            staged, engine = self._staged, self._hub.engine
            if staged is None or staged.update.update_id != update_id:
                raise FailedPrecondition(
                    f"the update {update_id[:64]!r} is not staged: it was committed or discarded, or another update was"
                    " staged after it; stage it again",
                    field="update_id",
                )
            self._staged, before = None, self._link.committed
            async with undo_on_error_async(self._forget_uncommitted, staged):
                pause = await asyncio.wrap_future(engine.pause(mode, recompute=recompute, join=True))
                began_ns, aborted = time.perf_counter_ns(), pause.aborted
                if mode is PauseMode.ABORT and not pause.joined:
                    aborted += self._hub.unchecked.abort(None)
                try:
                    async with self.committing:
                        weights = await self._write(staged)
                finally:
                    resuming = engine.resume(pause.number)
                await asyncio.wrap_future(resuming)
            paused_ns = 0 if pause.joined else time.perf_counter_ns() - began_ns
        if before.uploaded:  # No worker needs its files any more. The caller may have to resume, so it does not wait.
            self._begin_forgetting(Update(before.update_id, before.version, directory=""))
        log.info("weights committed", version=weights.version)
        return control_pb2.CommitWeightsResponse(weights=weights, aborted_samples=aborted, paused_ns=paused_ns)

    async def _forget_uncommitted(self, staged: _Staged) -> None:
        await self._forget(staged.update, commit_sent=staged.commit_sent)

    async def _write(self, staged: _Staged) -> weights_pb2.Weights:
        """Write staged weights on all workers, while the core is paused."""
        if not await self._hub.ask(lambda core: core.is_paused):
            raise FailedPrecondition("generation was resumed before the commit; stage the update again")
        self._check_awake()
        if self._link.stream is not staged.stream:
            raise Unavailable("a worker was lost after the update was staged; stage it again")
        staged.commit_sent = True
        try:
            weights = await asyncio.to_thread(staged.stream.weights.commit, staged.update.update_id)
        except TokaError:
            staged.stream.end()  # a new connection makes the weights of all workers equal
            raise
        self._link.committed = weights
        await asyncio.wrap_future(self._hub.engine.change_weights(weights))
        return weights

    def _check_awake(self) -> None:
        if self._link.sleep is not None and MemoryPart.WEIGHTS in self._link.sleep.parts:
            raise FailedPrecondition("the weights are asleep; wake them, and stage the update again")

    def _connected(self) -> WorkerStream:
        if (stream := self._link.stream) is None:
            raise Unavailable("no worker is connected; try again")
        return stream


async def _read_header(requests: AsyncIterator[control_pb2.UploadWeightsRequest]) -> control_pb2.UploadHeader:
    first = await anext(requests, None)
    if first is None or not first.HasField("header"):
        raise InvalidRequest("the first message of UploadWeights must be a header", field="header")
    return first.header


async def _read_chunks(
    requests: AsyncIterator[control_pb2.UploadWeightsRequest],
) -> AsyncIterator[weights_pb2.TensorChunk]:
    async for request in requests:
        if not request.HasField("chunk"):
            raise InvalidRequest("expected a chunk after the header", field="chunk")
        yield request.chunk


def check_version(version: str, field: str) -> None:
    """Raise ``InvalidRequest`` if the version in ``field`` is empty or too long."""
    if not 1 <= len(version) <= MAX_WEIGHTS_VERSION:
        raise InvalidRequest(f"expected 1 to {MAX_WEIGHTS_VERSION} characters", field=field)


def _lost() -> Unavailable:
    return Unavailable("a worker was lost during the upload; upload the weights again")
