"""Records of Batch jobs: create, read, list, cancel. Work on them is in ``leases``."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from services.common.errors import AlreadyExists, FailedPrecondition, InvalidValue, Overloaded
from services.gateway.store.database import Store
from services.gateway.store.files import FILES
from services.gateway.store.forecast import RECENT_CHUNKS, BatchForecast, forecast
from services.gateway.store.ids import now
from services.gateway.store.owned import OwnedRows
from services.gateway.store.tables import (
    ACTIVE,
    CANCELLING,
    IN_PROGRESS,
    VALIDATING,
    Chunk,
    StoredBatch,
)

MAX_UNFINISHED = 10_000  # Batch jobs of a key, of which ``work.MAX_ACTIVE_OF_KEY`` are in progress
COUNTS = ("completed", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
_BATCHES = OwnedRows(StoredBatch, StoredBatch.key_name, "batch", "batch_id")


class Counts(NamedTuple):
    """Current counts of a Batch job."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # included in completion_tokens


class Shown(NamedTuple):
    """A Batch job with its counts and forecast, which are computed from its chunks while it runs."""

    batch: StoredBatch
    counts: Counts
    forecast: BatchForecast | None


class Batches:
    """The records of Batch jobs in ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, batch: StoredBatch) -> Shown:
        """Add ``batch``.

        Raises ``NotFound`` or ``InvalidRequest`` for its input file, ``AlreadyExists`` if its id is in use, and
        ``Overloaded`` if its key has ``MAX_UNFINISHED`` Batch jobs.
        """
        try:
            async with self._store.writing() as session:
                await _check_room(session, batch.fairness_key)
                file = await FILES.find(
                    session, batch.input_file_id, batch.key_name, field="input_file_id", locked=True, shared=True
                )
                if file.purpose != "batch":
                    raise InvalidValue(
                        f"the file {file.id} was uploaded for {file.purpose!r}; upload it with purpose batch",
                        field="input_file_id",
                    )
                batch.input_blob = file.blob
                session.add(batch)
        except IntegrityError:
            raise AlreadyExists(f"there is a batch {batch.id}") from None
        return Shown(batch, Counts(), None)

    async def get(self, batch_id: str, key_name: str) -> Shown:
        """Return a Batch job. Raises ``NotFound``, also for another key's."""
        async with self._store.reading() as session:
            [shown] = await _shown(session, [await _BATCHES.find(session, batch_id, key_name)])
            return shown

    async def page(self, *, key_name: str, after: str | None, limit: int) -> tuple[Sequence[Shown], bool]:
        """Return at most ``limit`` Batch jobs of a key after ``after``, newest first, and whether there are more."""
        async with self._store.reading() as session:
            found, has_more = await _BATCHES.page(session, key_name, after=after, limit=limit, newest_first=True)
            return await _shown(session, found), has_more

    async def cancel(self, batch_id: str, key_name: str) -> Shown:
        """Start no further lines of a Batch job. Raises ``NotFound``, and ``FailedPrecondition`` if it has ended."""
        async with self._store.writing() as session:
            batch = await _BATCHES.find(session, batch_id, key_name, locked=True)
            if batch.status in (VALIDATING, IN_PROGRESS):
                batch.status, batch.cancelling_at = CANCELLING, now()
            elif batch.status != CANCELLING:
                raise FailedPrecondition(
                    f"the batch {batch_id} is {batch.status}; only one that is validating or in_progress can be"
                    " cancelled",
                    reason="BATCH_NOT_CANCELLABLE",
                )
            await session.flush()
            [shown] = await _shown(session, [batch])
            return shown


async def _check_room(session: AsyncSession, key: str) -> None:
    """Raise ``Overloaded`` if the fairness key has ``MAX_UNFINISHED`` Batch jobs."""
    unfinished = StoredBatch.fairness_key == key, StoredBatch.status.in_(ACTIVE)
    some = select(StoredBatch.seq).where(*unfinished).limit(MAX_UNFINISHED).subquery()
    if await session.scalar(select(func.count()).select_from(some)) == MAX_UNFINISHED:
        raise Overloaded(
            f"{MAX_UNFINISHED} batches of this caller have not ended; wait for some, or put more lines into one",
            retry_after_s=60.0,
            reason="TOO_MANY_BATCHES",
        )


async def counts_of(session: AsyncSession, batch: StoredBatch) -> Counts:
    """Return the counts of ``batch`` as committed so far."""
    return (await _counts(session, [batch]))[batch.seq]


async def _counts(session: AsyncSession, batches: Sequence[StoredBatch]) -> dict[int, Counts]:
    """Return the counts of each Batch job by ``seq``. Counts of active ones are the sums over their chunks."""
    counts = {batch.seq: Counts(batch.total, *(getattr(batch, name) for name in COUNTS)) for batch in batches}
    active = {batch.seq: batch for batch in batches if batch.status in ACTIVE}
    if active:
        counts |= {seq: Counts(batch.total) for seq, batch in active.items()}
        sums = (func.sum(getattr(Chunk, name)) for name in COUNTS)
        query = select(Chunk.batch_seq, *sums).where(Chunk.batch_seq.in_(active)).group_by(Chunk.batch_seq)
        for seq, *values in await session.execute(query):
            counts[seq] = Counts(active[seq].total, *map(int, values))
    return counts


async def _shown(session: AsyncSession, batches: Sequence[StoredBatch]) -> list[Shown]:
    counts = await _counts(session, batches)
    recent: dict[int, list[tuple[int, float]]] = {batch.seq: [] for batch in batches if batch.status == IN_PROGRESS}
    if recent:
        rank = func.row_number().over(partition_by=Chunk.batch_seq, order_by=Chunk.done_at.desc()).label("rank")
        done = Chunk.batch_seq.in_(recent), Chunk.done.is_(True), Chunk.done_at.is_not(None)
        found = select(Chunk.batch_seq, Chunk.count, Chunk.done_at, rank).where(*done).subquery()
        query = select(found.c.batch_seq, found.c.count, found.c.done_at).where(found.c.rank <= RECENT_CHUNKS)
        for seq, count, at in await session.execute(query.order_by(found.c.batch_seq, found.c.rank)):
            recent[seq].append((count, at))
    return [Shown(batch, counts[batch.seq], _forecast(batch, counts[batch.seq], recent)) for batch in batches]


def _forecast(
    batch: StoredBatch, counts: Counts, recent: Mapping[int, list[tuple[int, float]]]
) -> BatchForecast | None:
    if batch.seq not in recent:
        return None
    done, at = counts.completed + counts.failed, now()
    began_at = batch.in_progress_at or at
    return forecast(counts.total - done, recent[batch.seq], at, lines_done=done, began_at=began_at)
