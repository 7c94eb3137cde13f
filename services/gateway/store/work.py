"""Queries for Batch jobs that need work: one per poll, whatever the number of Batch jobs."""

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from services.gateway.store.ids import now
from services.gateway.store.tables import (
    ACTIVE,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    Chunk,
    StoredBatch,
)

MAX_ACTIVE_OF_KEY = 64  # Batch jobs in progress. Further ones of the key stay in ``validating`` until one ends.
_FOUND_OF_KEY = 4  # candidates of each key and phase, since another gateway may claim the first ones meanwhile
_ORPHANED_S = 60  # this time after its due end, gateways of every pool may finish a Batch job

ChunkKey = tuple[int, int]  # batch_seq, number of a chunk


class Candidate(NamedTuple):
    """A Batch job that can be claimed."""

    key: str  # fairness key
    seq: int
    validating: bool  # else it is to be finished


async def candidates(session: AsyncSession, pool: str) -> list[Candidate]:
    """Return Batch jobs to validate or to finish, the oldest few of each key.

    Gateways of ``pool`` work on its Batch jobs. A Batch job that is not finished a minute after it should have ended
    is finished by any gateway of the store.
    """
    overdue = now() - _ORPHANED_S
    times = (StoredBatch.expires_at, StoredBatch.cancelling_at, StoredBatch.finalizing_at)
    ours = or_(StoredBatch.pool == pool, *(at <= overdue for at in times))
    phase = _to_validate()
    full = (
        select(StoredBatch.fairness_key)
        .where(StoredBatch.status == IN_PROGRESS, StoredBatch.pool == pool)
        .group_by(StoredBatch.fairness_key)
        .having(func.count() >= MAX_ACTIVE_OF_KEY)
    )
    kind = StoredBatch.fairness_key, StoredBatch.status == VALIDATING
    rank = func.row_number().over(partition_by=kind, order_by=StoredBatch.seq)
    found = (
        select(StoredBatch.fairness_key, StoredBatch.seq, phase.label("validating"), rank.label("rank"))
        .where(StoredBatch.status.in_(ACTIVE), StoredBatch.lease_until <= time.time(), ours)
        .where(or_(phase & StoredBatch.fairness_key.not_in(full), _to_finish()))
        .subquery()
    )
    columns = (found.c.fairness_key, found.c.seq, found.c.validating)
    query = select(*columns).where(found.c.rank <= _FOUND_OF_KEY).order_by(found.c.seq)
    return [Candidate(*row) for row in await session.execute(query)]


def _to_validate() -> ColumnElement[bool]:
    return (StoredBatch.status == VALIDATING) & (StoredBatch.expires_at > now())


def _to_finish() -> ColumnElement[bool]:
    left = select(Chunk.number).where(Chunk.batch_seq == StoredBatch.seq, Chunk.done.is_(False))
    status = StoredBatch.status
    return or_(
        status == FINALIZING,
        # Results that arrive within a chunk's lease still count.
        (status == CANCELLING) & ~left.where(Chunk.lease_until > time.time()).exists(),
        status.in_((VALIDATING, IN_PROGRESS)) & (StoredBatch.expires_at <= now()),
        (status == IN_PROGRESS) & ~left.exists(),
    )


async def work_to_do(session: AsyncSession, batch: StoredBatch) -> dict[str, Any] | None:
    """Return the columns of ``batch`` to change for its validation or finishing, or None if it needs neither."""
    due = select(StoredBatch.seq).where(StoredBatch.seq == batch.seq, or_(_to_validate(), _to_finish()))
    if await session.scalar(due) is None:
        return None
    at, status = now(), batch.status
    if status in (FINALIZING, CANCELLING) or (status == VALIDATING and batch.expires_at > at):
        return {}
    return {"status": FINALIZING, "ending": EXPIRED if batch.expires_at <= at else COMPLETED, "finalizing_at": at}


async def runnable(
    session: AsyncSession, pool: str, without: Collection[str], held: Collection[ChunkKey]
) -> list[tuple[str, int]]:
    """Return Batch jobs with a free chunk as (key, seq), except those of the keys ``without``."""
    chunks = select(Chunk.number).where(Chunk.batch_seq == StoredBatch.seq, free(held))
    query = select(StoredBatch.fairness_key, StoredBatch.seq).where(
        StoredBatch.status == IN_PROGRESS,
        StoredBatch.pool == pool,
        StoredBatch.expires_at > now(),
        StoredBatch.fairness_key.not_in(without),
        chunks.exists(),
    )
    return [(key, seq) for key, seq in await session.execute(query)]


def free(held: Collection[ChunkKey]) -> ColumnElement[bool]:
    """Return the condition of chunks that a process can lease while it runs the chunks ``held``."""
    unleased = Chunk.done.is_(False) & (Chunk.lease_until <= time.time())
    return unleased & tuple_(Chunk.batch_seq, Chunk.number).not_in([*held])
