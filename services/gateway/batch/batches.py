"""Records of batches: made, shown, cancelled. What is done about them is in ``leases``."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from services.common.errors import AlreadyExists, FailedPrecondition, InvalidRequest, NotFound
from services.gateway.batch.files import find_file
from services.gateway.batch.forecast import RECENT_CHUNKS, Forecast, forecast
from services.gateway.batch.ids import now
from services.gateway.batch.store import Store
from services.gateway.batch.tables import (
    ACTIVE,
    CANCELLING,
    IN_PROGRESS,
    VALIDATING,
    Chunk,
    StoredBatch,
)

COUNTS = ("completed", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


class Counts(NamedTuple):
    """Of a batch, now."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion's


class Shown(NamedTuple):
    """A batch with what is counted elsewhere while it runs."""

    batch: StoredBatch
    counts: Counts
    forecast: Forecast | None


class Batches:
    """The records in ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, batch: StoredBatch) -> Shown:
        """Add ``batch``. Raises ``NotFound`` or ``InvalidRequest`` for its input file, ``AlreadyExists`` when there is
        a batch with its id."""
        try:
            await self._add(batch)
        except IntegrityError:
            raise AlreadyExists(f"there is a batch {batch.id}") from None
        return Shown(batch, Counts(), None)

    async def _add(self, batch: StoredBatch) -> None:
        async with self._store.writing() as session:
            file = await find_file(
                session, batch.input_file_id, batch.key_name, field="input_file_id", locked=True, shared=True
            )
            if file.purpose != "batch":
                raise InvalidRequest(
                    f"the file {file.id} was uploaded for {file.purpose!r}; upload it with purpose batch",
                    field="input_file_id",
                    reason="INVALID_VALUE",
                )
            batch.input_blob = file.blob
            session.add(batch)

    async def get(self, batch_id: str, key_name: str) -> Shown:
        """Raises ``NotFound``, also for one that another key made."""
        async with self._store.reading() as session:
            return await _shown(session, await _find(session, batch_id, key_name))

    async def page(self, *, key_name: str, after: str | None, limit: int) -> tuple[Sequence[Shown], bool]:
        """At most ``limit`` batches of a key behind ``after``, the newest first, and whether there are more."""
        own = StoredBatch.key_name == key_name
        query = select(StoredBatch).where(own).order_by(StoredBatch.seq.desc()).limit(limit + 1)
        async with self._store.reading() as session:
            if after is not None:
                last = await session.scalar(select(StoredBatch.seq).where(StoredBatch.id == after, own))
                if last is None:
                    raise InvalidRequest(f"after={after[:100]!r}: there is no such batch", field="after")
                query = query.where(StoredBatch.seq < last)
            found = (await session.scalars(query)).all()
            return [await _shown(session, batch) for batch in found[:limit]], len(found) > limit

    async def cancel(self, batch_id: str, key_name: str) -> Shown:
        """Let no more of its lines begin. Raises ``NotFound``, or ``FailedPrecondition`` when it is too late."""
        async with self._store.writing() as session:
            batch = await _find(session, batch_id, key_name, locked=True)
            if batch.status in (VALIDATING, IN_PROGRESS):
                batch.status, batch.cancelling_at = CANCELLING, now()
            elif batch.status != CANCELLING:
                raise FailedPrecondition(
                    f"the batch {batch_id} is {batch.status}; only one that is validating or in_progress can be"
                    " cancelled",
                    reason="BATCH_NOT_CANCELLABLE",
                )
            await session.flush()
            return await _shown(session, batch)


async def counts_of(session: AsyncSession, batch: StoredBatch) -> Counts:
    """As committed so far."""
    if batch.status not in ACTIVE:
        return Counts(batch.total, *(getattr(batch, name) for name in COUNTS))
    sums = (func.coalesce(func.sum(getattr(Chunk, name)), 0) for name in COUNTS)
    row = (await session.execute(select(*sums).where(Chunk.batch_seq == batch.seq))).one()
    return Counts(batch.total, *(int(value) for value in row))


async def _shown(session: AsyncSession, batch: StoredBatch) -> Shown:
    counts = await counts_of(session, batch)
    if batch.status != IN_PROGRESS:
        return Shown(batch, counts, None)
    recent = (
        await session.execute(
            select(Chunk.count, Chunk.done_at)
            .where(Chunk.batch_seq == batch.seq, Chunk.done.is_(True))
            .order_by(Chunk.done_at.desc())
            .limit(RECENT_CHUNKS)
        )
    ).all()
    chunks = [(count, at) for count, at in recent if at is not None]
    done, at = counts.completed + counts.failed, now()
    began_at = batch.in_progress_at or at
    return Shown(batch, counts, forecast(counts.total - done, chunks, at, lines_done=done, began_at=began_at))


async def _find(session: AsyncSession, batch_id: str, key_name: str, *, locked: bool = False) -> StoredBatch:
    query = select(StoredBatch).where(StoredBatch.id == batch_id, StoredBatch.key_name == key_name)
    batch = await session.scalar(query.with_for_update() if locked else query)
    if batch is None:
        raise NotFound(f"there is no batch {batch_id[:100]!r}", field="batch_id", reason="BATCH_NOT_FOUND")
    return batch
