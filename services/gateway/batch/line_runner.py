"""The lines of leased chunks, while they run."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from services.gateway.access.lines import Displaced, Line, Lines
from services.gateway.batch.blobs import Blobs
from services.gateway.batch.leases import ChunkKey, ChunkLease, Outcome
from services.gateway.batch.requests import Requests, failed
from services.gateway.batch.slots import Slot
from services.gateway.batch.validation import CHUNK_LINES

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class RunningChunk:
    """A chunk that is ours."""

    lease: ChunkLease
    left: set[int]  # lines without a result in the store
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # its lines, or what they wait for
    dropped: bool = False

    def drop(self) -> None:
        """It is not ours any more, or nobody wants it: no line of it begins, and those that run are stopped."""
        self.dropped = True
        for task in self.tasks:
            task.cancel()


class LineRunner:
    """Of an executor. Lives on its event loop."""

    def __init__(self, blobs: Blobs, requests: Requests, lines: Lines, concurrency: int) -> None:
        self._blobs = blobs
        self._requests = requests
        self._lines = lines
        self._slots = asyncio.Semaphore(concurrency)
        self._unstarted = 0  # lines of chunks that wait for a slot
        self._crowded: Counter[str] = Counter()  # chunks that wait for room, by the name of their key
        self._outcomes: list[tuple[ChunkKey, Outcome]] = []  # each holds a slot until it is kept
        self.room, self.news = asyncio.Event(), asyncio.Event()  # there may be, for chunks; there are outcomes

    @property
    def has_room(self) -> bool:
        """For another chunk: there will soon be slots for it."""
        return self._unstarted < CHUNK_LINES

    def crowded(self) -> list[str]:
        """Names of keys with a chunk that waits: no other one of theirs would run."""
        return [*(+self._crowded)]

    def take_outcomes(self) -> list[tuple[ChunkKey, Outcome]]:
        """Those that were not taken yet."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def kept(self, outcomes: int) -> None:
        """So many are in the store, or nobody wants them: there are slots for other lines."""
        for _ in range(outcomes):
            self._slots.release()

    def take(self, lease: ChunkLease) -> RunningChunk:
        """Its chunk, which is to be started next."""
        self._unstarted += len(lease.lines)
        return RunningChunk(lease, set(lease.lines[:, 0].tolist()))

    async def start(self, chunk: RunningChunk) -> None:
        """Begin each of the chunk's lines, in a task of its own, as slots become free. Raises ``TokaError`` when they
        cannot be read."""
        lease, left = chunk.lease, len(chunk.lease.lines)
        try:
            ranges = [(offset, size) for _, offset, size in lease.lines.tolist()]
            texts = await self._blobs.read_ranges(lease.batch.input_blob, ranges)
            for number, text in zip(lease.lines[:, 0].tolist(), texts, strict=True):
                line = await self._begin(chunk, left)
                if line is None:
                    return
                slot = Slot(self._slots)
                await slot.take()
                left -= 1
                self._started(1)
                if chunk.dropped:
                    line.end()
                    slot.give_back()
                    return
                task = asyncio.create_task(self._run(lease, number, text, line, slot))
                chunk.tasks.add(task)
                task.add_done_callback(partial(_line_over, chunk, line, slot))
        finally:
            self._started(left)

    def _started(self, lines: int) -> None:
        self._unstarted -= lines
        if self.has_room:
            self.room.set()

    async def _begin(self, chunk: RunningChunk, left: int) -> Line | None:
        """The next of a chunk's lines, ``left`` of them, once its key has room for it; None: nobody wants it any more.
        While the chunk waits, chunks of others take its place, and no other one of that key."""
        name = chunk.lease.batch.key_name
        if chunk.dropped:
            return None
        if (line := self._lines.begin_now(name)) is not None:
            return line
        waiting = asyncio.create_task(self._lines.begin(name))
        chunk.tasks.add(waiting)
        self._crowded[name] += 1
        self._started(left)
        try:
            await asyncio.wait([waiting])
        finally:
            chunk.tasks.discard(waiting)
            self._crowded[name] -= 1
            self._unstarted += left
        return None if waiting.cancelled() else waiting.result()

    async def _run(self, lease: ChunkLease, number: int, text: bytes, line: Line, slot: Slot) -> None:
        try:
            result = await self._result(lease, number, text, line, slot)
        except Exception:
            await slot.take()  # it may have waited without one
            result = failed(lease.batch, number, text)
        self._outcomes.append((lease.key, result))
        self.news.set()

    async def _result(self, lease: ChunkLease, number: int, text: bytes, line: Line, slot: Slot) -> Outcome:
        while True:
            try:
                return await self._requests.run(lease.batch, number, text, line, slot)
            except Displaced:
                slot.give_back()
            line = await self._lines.begin(lease.batch.key_name)
            try:
                await slot.take()
            except BaseException:
                line.end()
                raise


def _line_over(chunk: RunningChunk, line: Line, slot: Slot, task: asyncio.Task[Any]) -> None:
    """A line has a result, which has its slot until it is kept; or it was stopped, perhaps before it began."""
    chunk.tasks.discard(task)
    line.end()
    if task.cancelled():
        slot.give_back()
    elif (error := task.exception()) is not None:
        slot.give_back()
        log.error("batch line failed", id=chunk.lease.batch.id, exc_info=error)
