"""Leases of work on Batch jobs: validation, finishing, and chunks of lines to run.

A lease is an owner and a time in the row itself. Heartbeats extend it. Any gateway may take an expired lease. Writes
name their owner, so those of a former owner have no effect, and no result is written twice.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, delete, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from services.common.chunks import chunks_by_size
from services.gateway.store.batches import COUNTS, Counts, counts_of
from services.gateway.store.database import Store
from services.gateway.store.expiry import AT_ONCE, delete_some
from services.gateway.store.ids import now
from services.gateway.store.round_robin import RoundRobin
from services.gateway.store.tables import (
    ACTIVE,
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    VALIDATING,
    Chunk,
    LineResult,
    StoredBatch,
    StoredFile,
)
from services.gateway.store.work import Candidate, ChunkKey, candidates, free, runnable, work_to_do

LEASE_S = 10.0
HEARTBEAT_S = 3.0
_WRITTEN_AT_ONCE = 8 << 20  # bytes of results per statement, since statements have a timeout


class LeaseLost(Exception):
    """The lease was taken by another gateway, or the work is no longer needed."""


@dataclass(frozen=True)
class ChunkLease:
    """A lease of the lines of a chunk that have no result yet. ``lines``: int64 [n, 3] as in ``Chunk``."""

    batch: StoredBatch
    number: int
    lines: np.ndarray

    @property
    def key(self) -> ChunkKey:
        """The chunk's primary key."""
        return self.batch.seq, self.number


class LineOutcome(NamedTuple):
    """The result of a line."""

    line: int
    ok: bool
    body: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Leases:
    """The leases of the process ``owner``.

    It works on Batch jobs of ``pool``. It also finishes those of other pools that no gateway has finished in time.
    """

    def __init__(self, store: Store, *, owner: str, pool: str) -> None:
        self._store = store
        self._owner = owner
        self._pool = pool
        self._batch_order, self._chunk_order = RoundRobin(), RoundRobin()

    # Batch jobs.

    async def claim_batch(self, wanted: Callable[[Candidate], bool] = lambda _: True) -> StoredBatch | None:
        """Lease one of the ``wanted`` Batch jobs to validate or to finish it, or return None. Keys take turns.

        The status is ``validating`` if the Batch job is to be validated.
        """
        async with self._store.reading() as session:
            found = await self._candidates(session)
        order = self._batch_order.order((each.key, each.seq) for each in found if wanted(each))
        if not order:
            return None
        async with self._store.writing() as session:
            for seq in order:
                batch = await session.scalar(select(StoredBatch).where(StoredBatch.seq == seq).with_for_update())
                if batch is None or batch.lease_until > time.time():
                    continue
                changes = await work_to_do(session, batch)
                if changes is not None:
                    for name, value in changes.items():
                        setattr(batch, name, value)
                    batch.owner, batch.lease_until = self._owner, time.time() + LEASE_S
                    batch.attempt += 1
                    self._batch_order.served(batch.fairness_key, seq)
                    return batch
        return None

    async def _candidates(self, session: AsyncSession) -> list[Candidate]:
        """Return Batch jobs that may need work. They are not locked."""
        return await candidates(session, self._pool)

    async def give_back(self, batch: StoredBatch) -> None:
        """Release the lease of ``batch``."""
        async with self._store.writing() as session:
            mine = _own_lease(batch, self._owner)
            await session.execute(update(StoredBatch).where(mine).values(owner=None, lease_until=0.0))

    async def begin_validation(self, batch: StoredBatch) -> None:
        """Delete the chunks of an earlier attempt. Raises ``LeaseLost``."""
        async with self._store.writing() as session:
            await self._check_lease(session, batch, VALIDATING)
            await session.execute(delete(Chunk).where(Chunk.batch_seq == batch.seq))

    async def add_chunks(self, batch: StoredBatch, first: int, chunks: Sequence[np.ndarray]) -> None:
        """Add chunks, numbered from ``first``. Raises ``LeaseLost``."""
        rows = [
            {"batch_seq": batch.seq, "number": number, "lines": lines.astype(np.int64).tobytes(), "count": len(lines)}
            for number, lines in enumerate(chunks, first)
        ]
        async with self._store.writing() as session:
            await self._check_lease(session, batch, VALIDATING)
            await session.execute(insert(Chunk), rows)

    async def end_validation(
        self, batch: StoredBatch, *, total: int, model: str | None, errors: list[dict[str, Any]] | None
    ) -> None:
        """Start the lines of ``batch``, or fail it if there are ``errors``. Raises ``LeaseLost``."""
        async with self._store.writing() as session:
            await self._check_lease(session, batch, VALIDATING)
            values: dict[str, Any] = {"total": total, "model": model, "owner": None, "lease_until": 0.0}
            if errors:
                values |= {"status": FAILED, "failed_at": now(), "errors": errors}
            else:
                values |= {"status": IN_PROGRESS, "in_progress_at": now()}
            await session.execute(update(StoredBatch).where(StoredBatch.seq == batch.seq).values(**values))

    async def fail(self, batch_seq: int, message: str) -> None:
        """Fail a Batch job that cannot continue, regardless of its lease."""
        values = {"status": FAILED, "failed_at": now(), "ending": None, "owner": None, "lease_until": 0.0}
        errors = [{"code": "server_error", "message": message, "line": None, "param": None}]
        active = (StoredBatch.seq == batch_seq) & StoredBatch.status.in_(ACTIVE)
        async with self._store.writing() as session:
            await session.execute(update(StoredBatch).where(active).values(**values, errors=errors))

    async def close_chunks(self, batch: StoredBatch) -> Counts:
        """Accept no further results of ``batch``. Return its final counts. Raises ``LeaseLost``."""
        async with self._store.writing() as session:
            await self._check_lease(session, batch)
            await session.execute(
                update(Chunk)
                .where(Chunk.batch_seq == batch.seq, Chunk.done.is_(False))
                .values(owner=None, lease_until=0.0)
            )
            return await counts_of(session, batch)

    async def finish(
        self, batch: StoredBatch, counts: Counts, output: StoredFile | None, error: StoredFile | None
    ) -> None:
        """End ``batch`` with its files. Raises ``LeaseLost``."""
        async with self._store.writing() as session:
            await self._check_lease(session, batch)
            session.add_all(file for file in (output, error) if file is not None)
            ending = batch.ending or CANCELLED
            values = {"status": ending, f"{ending}_at": now(), "ending": None, "owner": None, "lease_until": 0.0}
            values |= {name: getattr(counts, name) for name in COUNTS}
            values |= {
                "output_file_id": output.id if output is not None else None,
                "error_file_id": error.id if error is not None else None,
            }
            await session.execute(update(StoredBatch).where(StoredBatch.seq == batch.seq).values(**values))

    async def results(self, batch: StoredBatch, after: int, limit: int) -> list[tuple[int, bool, bytes]]:
        """Return (line, ok, body) of at most ``limit`` lines after ``after``, in order."""
        query = select(LineResult.line, LineResult.ok, LineResult.body).where(
            LineResult.batch_seq == batch.seq, LineResult.line > after
        )
        async with self._store.reading() as session:
            rows = await session.execute(query.order_by(LineResult.line).limit(limit))
            return [(line, ok, body) for line, ok, body in rows]

    async def purge(self) -> bool:
        """Delete a number of chunks and results of Batch jobs that have ended. Return whether there may be more."""
        ended = StoredBatch.status.not_in(ACTIVE) & StoredBatch.purged.is_(False)
        async with self._store.writing() as session:
            some = select(StoredBatch.seq).where(ended).limit(AT_ONCE).with_for_update(skip_locked=True)
            seqs = (await session.scalars(some)).all()
            if not seqs:
                return False
            for table in (LineResult, Chunk):
                if await delete_some(session, table, table.batch_seq.in_(seqs)):
                    return True
            await session.execute(update(StoredBatch).where(StoredBatch.seq.in_(seqs)).values(purged=True))
        return True

    # Chunks.

    async def runnable(self, without: Collection[str] = (), held: Collection[ChunkKey] = ()) -> list[int]:
        """Return Batch jobs with free chunks, in the order in which to lease them.

        Keys take turns, and so do the Batch jobs of a key. The fairness keys ``without`` are left out. ``held`` is as
        in ``lease_chunk``.
        """
        async with self._store.reading() as session:
            found = await runnable(session, self._pool, without, held)
        return self._chunk_order.order(found)

    async def lease_chunk(self, batch_seq: int, held: Collection[ChunkKey] = ()) -> ChunkLease | None:
        """Lease the first free chunk of a Batch job, or return None.

        ``held`` are the chunks that this process runs. They are not leased again, even if their leases have expired.
        """
        async with self._store.writing() as session:
            # A shared lock: several gateways may lease at once, but the batch cannot end meanwhile.
            batch = await session.scalar(
                select(StoredBatch)
                .where(StoredBatch.seq == batch_seq, StoredBatch.status == IN_PROGRESS)
                .with_for_update(read=True)
            )
            if batch is None:
                return None
            chunk = await session.scalar(
                select(Chunk)
                .where(Chunk.batch_seq == batch_seq, free(held))
                .order_by(Chunk.number)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            if chunk is None:
                return None
            chunk.owner, chunk.lease_until = self._owner, time.time() + LEASE_S
            self._chunk_order.served(batch.fairness_key, batch_seq)
            lines = np.frombuffer(chunk.lines, np.int64).reshape(-1, 3)
            if chunk.completed + chunk.failed:
                lines = lines[~np.isin(lines[:, 0], await _lines_done(session, batch_seq, lines[:, 0].tolist()))]
            return ChunkLease(batch, chunk.number, lines)

    async def commit(self, outcomes: Mapping[ChunkKey, Sequence[LineOutcome]]) -> set[ChunkKey]:
        """Store outcomes of lines, by chunk. Return the chunks whose lease is lost. Their outcomes are not stored.

        A line that has a result keeps it: an earlier call may have been committed although it failed, or the process
        may have run the line under an earlier lease of the chunk.
        """
        lost = set()
        async with self._store.writing() as session:
            for key in sorted(outcomes):  # all processes lock in this order
                at_key = (Chunk.batch_seq == key[0], Chunk.number == key[1])
                mine = (Chunk.owner == self._owner, Chunk.done.is_(False))
                chunk = await session.scalar(select(Chunk).where(*at_key, *mine).with_for_update())
                if chunk is None:
                    lost.add(key)
                    continue
                by_line = {outcome.line: outcome for outcome in outcomes[key]}
                for line in await _lines_done(session, key[0], [*by_line]):
                    del by_line[line]
                for some in chunks_by_size(by_line.values(), lambda outcome: len(outcome.body), _WRITTEN_AT_ONCE):
                    rows = [{"batch_seq": key[0], "line": o.line, "ok": o.ok, "body": o.body} for o in some]
                    await session.execute(insert(LineResult), rows)
                _count(chunk, by_line.values())
        return lost

    async def beat(
        self, batches: Sequence[StoredBatch], chunks: Collection[ChunkKey]
    ) -> tuple[dict[int, str], set[ChunkKey]]:
        """Extend the leases of ``batches`` and ``chunks``. Other leases of this process expire.

        Return the status of each Batch job of the chunks that are still leased, and these chunks. A lost lease of a
        Batch job is noticed at the next write, which raises ``LeaseLost``.
        """
        until = time.time() + LEASE_S
        async with self._store.writing() as session:
            for batch in sorted(batches, key=lambda batch: batch.seq):
                await session.execute(
                    update(StoredBatch).where(_own_lease(batch, self._owner)).values(lease_until=until)
                )
            mine = (
                Chunk.owner == self._owner,
                Chunk.done.is_(False),
                tuple_(Chunk.batch_seq, Chunk.number).in_([*chunks]),
            )
            await session.execute(update(Chunk).where(*mine).values(lease_until=until))
            kept = await session.execute(select(Chunk.batch_seq, Chunk.number).where(*mine))
            ours = {(seq, number) for seq, number in kept}
            query = select(StoredBatch.seq, StoredBatch.status).where(StoredBatch.seq.in_({seq for seq, _ in ours}))
            return {row.seq: row.status for row in await session.execute(query)}, ours

    async def release(self, batch_seq: int | None = None) -> None:
        """Release the leases of the chunks of one Batch job, or (None) all leases."""
        async with self._store.writing() as session:
            chunks = update(Chunk).where(Chunk.owner == self._owner, Chunk.done.is_(False))
            if batch_seq is not None:
                chunks = chunks.where(Chunk.batch_seq == batch_seq)
            await session.execute(chunks.values(owner=None, lease_until=0.0))
            if batch_seq is None:
                batches = update(StoredBatch).where(StoredBatch.status.in_(ACTIVE), StoredBatch.owner == self._owner)
                await session.execute(batches.values(owner=None, lease_until=0.0))

    async def _check_lease(self, session: AsyncSession, batch: StoredBatch, status: str | None = None) -> None:
        mine = _own_lease(batch, self._owner)
        query = select(StoredBatch.seq).where(mine, StoredBatch.status == (status or batch.status)).with_for_update()
        if await session.scalar(query) is None:
            raise LeaseLost


def _own_lease(batch: StoredBatch, owner: str) -> ColumnElement[bool]:
    """Return the condition that this attempt has the lease. The same owner may have lost it and leased it again."""
    return (StoredBatch.seq == batch.seq) & (StoredBatch.owner == owner) & (StoredBatch.attempt == batch.attempt)


def _count(chunk: Chunk, outcomes: Collection[LineOutcome]) -> None:
    """Add ``outcomes`` to the counts of a leased chunk. The last line completes the chunk."""
    ok = sum(outcome.ok for outcome in outcomes)
    chunk.lease_until = time.time() + LEASE_S
    chunk.completed += ok
    chunk.failed += len(outcomes) - ok
    for name in COUNTS[2:]:
        setattr(chunk, name, getattr(chunk, name) + sum(getattr(outcome, name) for outcome in outcomes))
    if chunk.completed + chunk.failed == chunk.count:
        chunk.done, chunk.done_at, chunk.owner, chunk.lease_until = True, time.time(), None, 0.0


async def _lines_done(session: AsyncSession, batch_seq: int, lines: list[int]) -> list[int]:
    query = select(LineResult.line).where(LineResult.batch_seq == batch_seq, LineResult.line.in_(lines))
    return list(await session.scalars(query))
