"""What a gateway does for batches in the background: validates, runs and finishes them, beside all other gateways."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from services.common.errors import Internal, TokaError, Unavailable
from services.gateway.batch.blobs import Blobs
from services.gateway.batch.files import Files
from services.gateway.batch.finishing import finish
from services.gateway.batch.leases import HEARTBEAT_S, ChunkLease, LeaseLost, Leases, Outcome
from services.gateway.batch.requests import Requests
from services.gateway.batch.responses import Responses
from services.gateway.batch.tables import IN_PROGRESS, VALIDATING, StoredBatch
from services.gateway.batch.tries import Tries
from services.gateway.batch.validation import CHUNK_LINES, validate

log = structlog.get_logger(__name__)

POLL_S = 1.0  # how late work of other gateways, or that they left, is found
CLEAN_UP_S = 60.0
_PURGE_PAUSE_S = 0.01
_RETRY_S = 1.0  # after the store did not answer

Key = tuple[int, int]  # batch_seq, number of a chunk


@dataclass(eq=False)
class _Running:
    """A chunk that is ours."""

    lease: ChunkLease
    left: set[int]  # lines without a result in the store
    tasks: set[asyncio.Task] = field(default_factory=set)


class Executor:
    """Lives on the gateway's event loop between ``start`` and ``stop``. Only lines are ever cancelled: whatever talks
    to the store goes on to its end, and looks whether to stop between one thing and the next."""

    def __init__(
        self,
        leases: Leases,
        files: Files,
        responses: Responses,
        tries: Tries,
        blobs: Blobs,
        requests: Requests,
        *,
        concurrency: int,
        max_body_bytes: int,
    ) -> None:
        self._leases = leases
        self._files = files
        self._responses = responses
        self._tries = tries
        self._blobs = blobs
        self._requests = requests
        self._max_body_bytes = max_body_bytes
        self._slots = asyncio.Semaphore(concurrency)
        self._unstarted = 0  # lines that are leased and wait for a slot
        self._chunks: dict[Key, _Running] = {}
        self._outcomes: list[tuple[Key, Outcome]] = []  # each holds a slot until it is committed
        self._phases: dict[int, StoredBatch] = {}  # batches that we validate or finish
        self._turn: deque[int] = deque()  # batches, the one that was served last at the end
        self._stopping = False
        self._work, self._room, self._news = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._beat_now = asyncio.Event()
        self._over = asyncio.Event()
        self._writing = asyncio.Lock()  # our transactions on several chunks, one at a time
        self._tasks: list[asyncio.Task] = []
        self._spawned: set[asyncio.Task] = set()

    def start(self) -> None:
        """Begin to look for work."""
        loops = (self._lead, self._fill, self._commit, self._beat, self._clean_up)
        self._tasks = [asyncio.create_task(self._forever(loop), name=f"batch {loop.__name__}") for loop in loops]

    def look(self) -> None:
        """There may be something new to do, or to stop."""
        self._work.set()
        self._room.set()
        self._beat_now.set()

    async def stop(self) -> None:
        """Stop running lines, keep the results there are, and leave the rest to others at once."""
        self._stopping = True
        self._over.set()
        for running in self._chunks.values():
            for task in running.tasks:
                task.cancel()
        self.look()
        self._news.set()
        await asyncio.gather(*self._tasks, *self._spawned, return_exceptions=True)
        with contextlib.suppress(TokaError):
            await self._commit_outcomes()
            await self._leases.release()

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """``step`` again and again, whatever happens to it."""
        while not self._stopping:
            try:
                await step()
            except Unavailable as error:
                log.warning("batches wait", reason=error.message)
                await asyncio.sleep(_RETRY_S)
            except Exception:
                log.exception("batch work failed")
                await asyncio.sleep(_RETRY_S)

    # Validating and finishing.

    async def _lead(self) -> None:
        batch = None if self._phases else await self._leases.claim_batch()
        if batch is not None:
            self._phases[batch.seq] = batch
            self._spawn(self._phase(batch))
            return
        await _wait(self._work, POLL_S)

    async def _phase(self, batch: StoredBatch) -> None:
        log.info("batch", id=batch.id, status=batch.status, attempt=batch.attempt)
        try:
            if batch.status == VALIDATING:
                await validate(batch, self._leases, self._blobs, self._max_body_bytes)
            else:
                await finish(batch, self._leases, self._blobs)
        except (LeaseLost, Unavailable) as error:
            log.info("batch given back", id=batch.id, reason=str(error) or "it is not ours, or has ended")
            with contextlib.suppress(Unavailable):
                await self._leases.give_back(batch)
            await asyncio.sleep(_RETRY_S if isinstance(error, Unavailable) else 0)
        except Exception as error:
            log.exception("batch failed", id=batch.id)
            message = (
                error.message if isinstance(error, Internal) else "internal error; the server's log has the details"
            )
            with contextlib.suppress(Unavailable):
                await self._leases.fail(batch.seq, message)
        finally:
            del self._phases[batch.seq]
            self.look()

    # Running lines.

    async def _fill(self) -> None:
        """Lease another chunk whenever there will soon be slots for it."""
        if self._unstarted >= CHUNK_LINES:
            self._room.clear()
            await self._room.wait()
            return
        lease = await self._next_lease()
        if lease is None:
            self._room.clear()
            await _wait(self._room, POLL_S)
        elif self._stopping:
            return
        else:
            self._chunks[lease.key] = _Running(lease, set(lease.lines[:, 0].tolist()))
            self._unstarted += len(lease.lines)
            self._spawn(self._start_lines(self._chunks[lease.key]))

    async def _next_lease(self) -> ChunkLease | None:
        """Batches take turns."""
        runnable = await self._leases.runnable()
        known = set(runnable)
        self._turn = deque(seq for seq in self._turn if seq in known)
        self._turn.extend(seq for seq in runnable if seq not in self._turn)
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            lease = await self._leases.lease_chunk(self._turn[-1])
            if lease is not None:
                return lease
        return None

    async def _start_lines(self, running: _Running) -> None:
        """Each of the chunk's lines in a task of its own, as slots become free."""
        lease, left = running.lease, len(running.lease.lines)
        try:
            ranges = [(offset, size) for _, offset, size in lease.lines.tolist()]
            texts = await self._blobs.read_ranges(lease.batch.input_blob, ranges)
            if not texts:  # all done, but for its end, which the next heartbeat would miss
                await self._end_chunk(lease.key)
            for number, text in zip(lease.lines[:, 0].tolist(), texts, strict=True):
                await self._slots.acquire()
                left -= 1
                self._started(1)
                if self._stopping or self._chunks.get(lease.key) is not running:
                    self._slots.release()
                    return
                task = asyncio.create_task(self._run_line(lease, number, text))
                running.tasks.add(task)
                task.add_done_callback(running.tasks.discard)
        except TokaError as error:
            self._chunks.pop(lease.key, None)
            log.error("batch lines cannot be read", id=lease.batch.id, reason=error.message)
            with contextlib.suppress(Unavailable):
                if isinstance(error, Internal):
                    await self._leases.fail(lease.batch.seq, error.message)
        finally:
            self._started(left)

    def _started(self, lines: int) -> None:
        self._unstarted -= lines
        if self._unstarted < CHUNK_LINES:
            self._room.set()

    async def _run_line(self, lease: ChunkLease, number: int, text: bytes) -> None:
        try:
            batch = lease.batch
            result = await self._requests.run(batch.endpoint, number, text, batch.fairness_key, batch.key_name)
        except BaseException:
            self._slots.release()
            raise
        self._outcomes.append((lease.key, result))
        self._news.set()

    # Keeping what came out.

    async def _commit(self) -> None:
        await self._news.wait()
        self._news.clear()
        await self._commit_outcomes()

    async def _commit_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        by_chunk: dict[Key, list[Outcome]] = {}
        for key, result in outcomes:
            by_chunk.setdefault(key, []).append(result)
        if not by_chunk:
            return
        again = False
        while True:
            try:
                async with self._writing:
                    lost = await self._leases.commit(by_chunk, again=again)
                break
            except Unavailable as error:
                if self._stopping:
                    raise
                log.warning("results of batches wait", reason=error.message)
                again = True
                await asyncio.sleep(_RETRY_S)
        for _ in outcomes:
            self._slots.release()
        for key in lost:
            self._drop(key)
        for key, results in by_chunk.items():
            self._done(key, {result.line for result in results})

    def _done(self, key: Key, lines: set[int]) -> None:
        """``lines`` of a chunk are kept; with the last of them it is over."""
        running = self._chunks.get(key)
        if running is None:
            return
        running.left -= lines
        if not running.left:
            del self._chunks[key]
            self._work.set()  # it may have been the last of the batch

    async def _end_chunk(self, key: Key) -> None:
        async with self._writing:
            await self._leases.commit({key: []}, again=False)
        self._chunks.pop(key, None)
        self._work.set()

    def _drop(self, key: Key) -> None:
        """A chunk is not ours any more, or nobody wants it."""
        running = self._chunks.pop(key, None)
        if running is not None:
            for task in running.tasks:
                task.cancel()

    # Staying alive in the store.

    async def _beat(self) -> None:
        await _wait(self._beat_now, HEARTBEAT_S)
        if not self._chunks and not self._phases:
            return
        began = dict(self._chunks)
        async with self._writing:
            statuses, chunks = await self._leases.beat(list(self._phases.values()))
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
        """Delete what is no longer needed, a little at a time."""
        while await self._leases.purge():
            if await _set_within(self._over, _PURGE_PAUSE_S):
                return
        for blob in await self._files.forget_expired():
            await self._blobs.delete(blob)
        while await self._responses.forget_expired():
            if await _set_within(self._over, _PURGE_PAUSE_S):
                return
        await self._tries.forget_expired()
        await _set_within(self._over, CLEAN_UP_S)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until ``event`` is set, for ``seconds`` at most; then it is cleared."""
    await _set_within(event, seconds)
    event.clear()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
