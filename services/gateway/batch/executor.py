"""Validates, runs and finishes Batch jobs in the background of a gateway. Several gateways may share one store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import structlog

from services.common.boundaries import errors_to
from services.common.errors import Internal, StoreUnavailable, TokaError, Unavailable
from services.gateway.batch.finishing import finish
from services.gateway.batch.line_runner import LineRunner, RunningChunk
from services.gateway.batch.validation import validate
from services.gateway.store.blobs import Blobs
from services.gateway.store.files import Files
from services.gateway.store.leases import HEARTBEAT_S, ChunkLease, LeaseLost, Leases, LineOutcome
from services.gateway.store.tables import IN_PROGRESS, VALIDATING, StoredBatch
from services.gateway.store.work import Candidate, ChunkKey

log = structlog.get_logger(__name__)

# Interval at which the store is searched for work that other gateways created or left unfinished.
POLL_S = 1.0
CLEAN_UP_S = 60.0
_PURGE_PAUSE_S = 0.01
_RETRY_S = 1.0  # after the store did not answer
# Maximum number of Batch jobs that a gateway validates at the same time, and of those that it finishes, each of
# another fairness key.
MAX_PHASES = 8
# Batch jobs that a search tries to lease from: other gateways may lease the last chunks of the first ones meanwhile.
_LEASE_TRIES = 8


class Executor:
    """The Batch work of one gateway, on its event loop, between ``start`` and ``stop``.

    Only tasks of lines are cancelled. A task that uses the store completes each operation, and checks for ``stop``
    before the next one.
    """

    def __init__(
        self,
        leases: Leases,
        files: Files,
        blobs: Blobs,
        runner: LineRunner,
        *,
        forget_expired: Sequence[Callable[[], Awaitable[bool]]],
        max_body_bytes: int,
    ) -> None:
        """``forget_expired`` deletes records of other kinds. Each function returns whether there may be more."""
        self._leases = leases
        self._files = files
        self._blobs = blobs
        self._runner = runner
        self._clean_ups = (leases.purge, self._forget_files, *forget_expired)
        self._max_body_bytes = max_body_bytes
        self._chunks: dict[ChunkKey, RunningChunk] = {}
        self._phases: dict[int, StoredBatch] = {}  # batches that this process validates or finishes
        self._checking = asyncio.Lock()  # held by the validation that computes
        self._stopping = False
        self._work, self._beat_now, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._writing = asyncio.Lock()  # held by a transaction on several chunks: one of this gateway runs at a time
        self._tasks: list[asyncio.Task[None]] = []
        self._spawned: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to look for work."""
        loops = (self._lead, self._fill, self._commit, self._beat, self._clean_up)
        self._tasks = [asyncio.create_task(self._forever(loop), name=f"batch {loop.__name__}") for loop in loops]

    def look(self) -> None:
        """Search for new work, and for cancelled Batch jobs, now instead of at the next interval."""
        self._work.set()
        self._runner.room.set()
        self._beat_now.set()

    async def stop(self) -> None:
        """Cancel running lines, store the results so far, and release the leases for other gateways."""
        self._stopping = True
        self._over.set()
        for chunk in self._chunks.values():
            chunk.drop()
        self.look()
        self._runner.news.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # from here on nothing is spawned
        with contextlib.suppress(TokaError):
            await self._commit_outcomes()  # chunks may wait for the slots of results
        await asyncio.gather(*self._spawned, return_exceptions=True)
        with contextlib.suppress(TokaError):
            await self._commit_outcomes()
            await self._leases.release()

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Call ``step`` repeatedly until ``stop``. An exception does not end the loop; it is logged once in a row."""
        logged = ""
        while not self._stopping:
            try:
                await step()
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
            except Exception as error:
                if repr(error) != logged:
                    log.exception("batch work failed")
                    logged = repr(error)
                await asyncio.sleep(_RETRY_S)
            else:
                logged = ""

    # Validating and finishing.

    async def _lead(self) -> None:
        """Start a phase of another Batch job, or wait for one."""
        batch = await self._leases.claim_batch(self._may_begin)
        if batch is not None and not self._stopping:
            self._phases[batch.seq] = batch
            self._spawn(self._phase(batch))
            return
        await _wait(self._work, POLL_S)

    def _may_begin(self, candidate: Candidate) -> bool:
        """Return whether to begin a phase of the candidate: one of each kind for a key, and ``MAX_PHASES`` in all."""
        phases = self._phases.values()
        keys = [each.fairness_key for each in phases if (each.status == VALIDATING) == candidate.validating]
        return candidate.key not in keys and len(keys) < MAX_PHASES

    @contextlib.asynccontextmanager
    async def _validation_turn(self) -> AsyncIterator[None]:
        """Wait until no other validation computes. Raises ``LeaseLost`` if the gateway stops."""
        async with self._checking:
            if self._stopping:
                raise LeaseLost("the gateway stops")
            yield

    async def _phase(self, batch: StoredBatch) -> None:
        log.info("batch", id=batch.id, status=batch.status, attempt=batch.attempt)
        try:
            if batch.status == VALIDATING:
                await validate(batch, self._leases, self._blobs, self._max_body_bytes, self._validation_turn)
            else:
                await finish(batch, self._leases, self._blobs)
        except (LeaseLost, Unavailable) as error:
            if not isinstance(error, StoreUnavailable):
                log.info(
                    "batch given back", id=batch.id, reason=str(error) or "another gateway has it, or it has ended"
                )
            with contextlib.suppress(Unavailable):
                await self._leases.give_back(batch)
            await asyncio.sleep(_RETRY_S if isinstance(error, Unavailable) else 0)
        except Exception as error:
            log.exception("batch failed", id=batch.id)
            message = error.message if isinstance(error, Internal) else Internal.logged().message
            with contextlib.suppress(Unavailable):
                await self._leases.fail(batch.seq, message)
        finally:
            del self._phases[batch.seq]
            self.look()

    # Running lines.

    async def _fill(self) -> None:
        """Lease another chunk as soon as the runner has room for one."""
        if not self._runner.has_room:
            self._runner.room.clear()
            await self._runner.room.wait()
            return
        self._runner.room.clear()
        lease = await self._next_lease()
        if lease is None:
            await _wait(self._runner.room, POLL_S)
        elif self._stopping:
            return
        else:
            self._chunks[lease.key] = chunk = self._runner.take(lease)
            self._spawn(self._run(chunk))

    async def _next_lease(self) -> ChunkLease | None:
        """Lease a chunk of the key whose turn it is. Return None if there is none.

        A chunk that runs here is not leased again, even if its heartbeat is late.
        """
        runnable = await self._leases.runnable(self._runner.full(), self._chunks)
        for seq in runnable[:_LEASE_TRIES]:
            lease = await self._leases.lease_chunk(seq, self._chunks)
            if lease is not None:
                return lease
        return None

    async def _run(self, chunk: RunningChunk) -> None:
        with errors_to(partial(self._give_up, chunk)):
            await self._begin(chunk)

    def _give_up(self, chunk: RunningChunk, error: Exception) -> None:
        self._drop(chunk.lease.key)
        log.error("batch lines cannot be begun", id=chunk.lease.batch.id, exc_info=error)

    async def _begin(self, chunk: RunningChunk) -> None:
        key, batch = chunk.lease.key, chunk.lease.batch
        try:
            if not chunk.left:  # every result is stored, but the chunk is not closed: no later result would close it
                await self._keep({key: []})
            await self._runner.start(chunk)
        except TokaError as error:
            self._drop(key)
            log.error("batch lines cannot be read", id=batch.id, reason=error.message)
            with contextlib.suppress(Unavailable):
                if isinstance(error, Internal):
                    await self._leases.fail(batch.seq, error.message)

    # Storing results.

    async def _commit(self) -> None:
        """Wait for results, and store them."""
        await self._runner.news.wait()
        self._runner.news.clear()
        await self._commit_outcomes()

    async def _commit_outcomes(self) -> None:
        results = self._runner.take_results()
        by_chunk: dict[ChunkKey, list[LineOutcome]] = {}
        for result in results:
            by_chunk.setdefault(result.chunk, []).append(result.outcome)
        try:
            if by_chunk:
                await self._keep(by_chunk)
        finally:
            self._runner.kept(results)

    async def _keep(self, by_chunk: dict[ChunkKey, list[LineOutcome]]) -> None:
        """Store results. If the store rejects those of a chunk, drop the chunk, whose lines then run again."""
        try:
            lost = await self._committed(by_chunk)
        except Unavailable:
            raise
        except Exception:
            if len(by_chunk) > 1:
                for key, results in by_chunk.items():
                    await self._keep({key: results})
                return
            lost = {*by_chunk}
            log.exception("results of a batch cannot be stored", chunks=[*by_chunk])
        for key, results in by_chunk.items():
            if key in lost:
                self._drop(key)
            else:
                self._done(key, {result.line for result in results})

    async def _committed(self, by_chunk: dict[ChunkKey, list[LineOutcome]]) -> set[ChunkKey]:
        """Store results, and retry until the store answers or ``stop``. Return the chunks whose lease was lost."""
        while True:
            try:
                async with self._writing:
                    return await self._leases.commit(by_chunk)
            except Unavailable:
                if self._stopping:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _done(self, key: ChunkKey, lines: set[int]) -> None:
        """Record that the results of ``lines`` are stored. Drop the chunk after its last line."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        chunk.left -= lines
        if not chunk.left:
            self._drop(key)
            self._work.set()  # it may have been the last of the batch

    def _drop(self, key: ChunkKey) -> None:
        """Stop running a chunk: it is done, its lease was lost, or its Batch job has ended."""
        if (chunk := self._chunks.pop(key, None)) is not None:
            chunk.drop()

    # Heartbeats.

    async def _beat(self) -> None:
        """Renew the leases, and drop the chunks whose lease was lost or whose Batch job has ended."""
        await _wait(self._beat_now, HEARTBEAT_S)
        if not self._chunks and not self._phases:
            return
        began = dict(self._chunks)
        async with self._writing:
            statuses, chunks = await self._leases.beat(list(self._phases.values()), began)
        for key in began.keys() - chunks:
            if self._chunks.get(key) is began[key]:
                self._drop(key)
        unwanted = {seq for seq, status in statuses.items() if status != IN_PROGRESS}
        for key in [key for key in self._chunks if key[0] in unwanted]:
            self._drop(key)
        if unwanted:
            await self._commit_outcomes()
            for seq in unwanted:
                async with self._writing:
                    await self._leases.release(seq)
            self._work.set()

    async def _clean_up(self) -> None:
        """Delete expired rows and files, in small transactions with pauses for other work."""
        for step in self._clean_ups:
            while await step():
                if await _set_within(self._over, _PURGE_PAUSE_S):
                    return
        await _set_within(self._over, CLEAN_UP_S)

    async def _forget_files(self) -> bool:
        blobs = await self._files.forget_expired()
        for blob in blobs:
            await self._blobs.delete(blob)
        return bool(blobs)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until ``event`` is set, for ``seconds`` at most, and clear it."""
    await _set_within(event, seconds)
    event.clear()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
