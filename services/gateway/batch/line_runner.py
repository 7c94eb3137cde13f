"""Runs the lines of leased chunks."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import structlog

from services.common.boundaries import undo_on_error
from services.common.chunks import chunks_by_size
from services.gateway.batch.requests import Requests, failed
from services.gateway.batch.slots import LineSlots, Slot
from services.gateway.batch.validation import CHUNK_LINES
from services.gateway.http.lines import Displaced, Line, Lines
from services.gateway.store.blobs import BLOCK_BYTES, Blobs
from services.gateway.store.leases import ChunkLease, LineOutcome
from services.gateway.store.work import ChunkKey

log = structlog.get_logger(__name__)

_WAITING_KEYS = 64  # keys with chunks whose lines wait for slots
_RESERVED = 16  # one in 16 slots is for keys that run few lines


class Result(NamedTuple):
    """The outcome of a line. It occupies its slot until it is in the store."""

    chunk: ChunkKey
    outcome: LineOutcome
    slot: Slot


@dataclass(eq=False)
class RunningChunk:
    """A chunk that this process has leased."""

    lease: ChunkLease
    left: set[int]  # lines without a result in the store
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # of its lines, or of what they wait for
    dropped: bool = False

    def drop(self) -> None:
        """Start no more lines of the chunk, and cancel those that run: its lease or its batch has ended."""
        self.dropped = True
        for task in self.tasks:
            task.cancel()


class LineRunner:
    """Runs the lines of an executor's chunks, on its event loop.

    Keys share the slots: see ``LineSlots``. The next chunk of a key is leased when fewer lines of the key than one
    chunk has wait for slots. A free slot therefore finds a waiting line of every key that has unfinished lines.
    """

    def __init__(self, blobs: Blobs, requests: Requests, lines: Lines, concurrency: int) -> None:
        self._blobs = blobs
        self._requests = requests
        self._lines = lines
        # Without API keys there is one tenant, which may use every slot.
        self._slots = LineSlots(concurrency, concurrency // _RESERVED if lines.guard.wants_keys else 0)
        self._unstarted: Counter[str] = Counter()  # lines of chunks that wait for a slot, by fairness key
        self._crowded: Counter[str] = Counter()  # chunks that wait for their key's limits, by fairness key
        self._results: list[Result] = []
        self.room = asyncio.Event()  # set when another chunk may be leased
        self.news = asyncio.Event()  # set when there are results

    @property
    def free_slots(self) -> int:
        """Number of slots that no line has."""
        return self._slots.free

    @property
    def has_room(self) -> bool:
        """Permission to lease another chunk, of a key that is not ``full``."""
        return len(self._unstarted.keys() - (+self._crowded).keys()) < _WAITING_KEYS

    def full(self) -> list[str]:
        """Return the keys that should lease no further chunk: enough of their lines wait already."""
        return [*{key for key in self._unstarted if self.waiting(key) >= CHUNK_LINES} | (+self._crowded).keys()]

    def waiting(self, key: str) -> int:
        """Return how many leased lines of a key wait for slots."""
        return self._unstarted[key]

    def take_results(self) -> list[Result]:
        """Return the results that were not taken yet."""
        results, self._results = self._results, []
        return results

    def kept(self, results: Iterable[Result]) -> None:
        """Give back the slots of ``results``, which are in the store or are not needed."""
        for result in results:
            result.slot.give_back()

    def take(self, lease: ChunkLease) -> RunningChunk:
        """Return the chunk of ``lease``, which the caller starts next."""
        self._unstarted[lease.batch.fairness_key] += len(lease.lines)
        return RunningChunk(lease, set(lease.lines[:, 0].tolist()))

    async def start(self, chunk: RunningChunk) -> None:
        """Start each line of the chunk in its own task when it gets a slot.

        Raises ``TokaError`` if the lines cannot be read.
        """
        batch, left = chunk.lease.batch, len(chunk.lease.lines)
        try:
            # Lines may wait for a long time. Reading them in small blocks keeps the memory for them small.
            for some in chunks_by_size(chunk.lease.lines.tolist(), lambda line: int(line[2]), BLOCK_BYTES):
                ranges = [(offset, size) for _, offset, size in some]
                texts = await self._blobs.read_ranges(batch.input_blob, ranges)
                for (number, _, _), text in zip(some, texts, strict=True):
                    if not await self._start_line(chunk, number, text):
                        return
                    left -= 1
                    self._started(batch.fairness_key, 1)
        finally:
            self._started(batch.fairness_key, left)

    async def _start_line(self, chunk: RunningChunk, number: int, text: bytes) -> bool:
        """Start a line when its key and the slots have room. Returns False if the chunk was dropped meanwhile."""
        line = await self._begin(chunk)
        if line is None:
            return False
        slot = Slot(self._slots, chunk.lease.batch.fairness_key)
        await slot.take()
        if chunk.dropped:
            line.end()
            slot.give_back()
            return False
        task = asyncio.create_task(self._run(chunk.lease, number, text, line, slot))
        chunk.tasks.add(task)
        task.add_done_callback(partial(_line_over, chunk, line, slot))
        return True

    def _started(self, key: str, lines: int) -> None:
        """Count ``lines`` of a key as started, or as given up."""
        full = self._unstarted[key] >= CHUNK_LINES
        self._unstarted[key] -= lines
        if not self._unstarted[key]:
            del self._unstarted[key]
        if full and self._unstarted[key] < CHUNK_LINES:
            self.room.set()

    async def _begin(self, chunk: RunningChunk) -> Line | None:
        """Return the chunk's next line when its key's limits have room for it, or None if the chunk was dropped."""
        name, key = chunk.lease.batch.key_name, chunk.lease.batch.fairness_key
        if chunk.dropped:
            return None
        if (line := self._lines.begin_now(name)) is not None:
            return line
        waiting = asyncio.create_task(self._lines.begin(name))
        chunk.tasks.add(waiting)
        self._crowded[key] += 1
        self.room.set()
        try:
            await asyncio.wait([waiting])
        finally:
            chunk.tasks.discard(waiting)
            self._crowded[key] -= 1
        return None if waiting.cancelled() else waiting.result()

    async def _run(self, lease: ChunkLease, number: int, text: bytes, line: Line, slot: Slot) -> None:
        try:
            result = await self._result(lease, number, text, line, slot)
        except Exception:
            await slot.take()  # it may have waited without one
            result = failed(lease.batch, number, text)
        self._results.append(Result(lease.key, result, slot))
        self.news.set()

    async def _result(self, lease: ChunkLease, number: int, text: bytes, line: Line, slot: Slot) -> LineOutcome:
        while True:
            try:
                return await self._requests.run(lease.batch, number, text, line, slot)
            except Displaced:
                slot.give_back()
            line = await self._lines.begin(lease.batch.key_name)
            with undo_on_error(line.end):
                await slot.take()


def _line_over(chunk: RunningChunk, line: Line, slot: Slot, task: asyncio.Task[Any]) -> None:
    """Clean up after a line. A result has the slot until it is kept; a line without a result gives the slot back."""
    chunk.tasks.discard(task)
    line.end()
    if task.cancelled():
        slot.give_back()
    elif (error := task.exception()) is not None:
        slot.give_back()
        log.error("batch line failed", id=chunk.lease.batch.id, exc_info=error)
