"""Records of files: upload, list, delete, expire."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.exc import IntegrityError

from services.common.errors import AlreadyExists, FailedPrecondition
from services.gateway.store.database import Store
from services.gateway.store.ids import new_id, now
from services.gateway.store.owned import OwnedRows
from services.gateway.store.tables import ACTIVE, DELETED, PROCESSED, UPLOADING, StoredBatch, StoredFile

BATCH, BATCH_OUTPUT = "batch", "batch_output"
# Purposes that a client may give. Only files for Batch jobs are processed; the others are only stored.
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
# Default lifetime of input and output files of Batch jobs, as at OpenAI.
BATCH_FILES_EXPIRE_S = 30 * 24 * 3600
_UPLOAD_TIMEOUT_S = 24 * 3600
_DELETED_KEPT_S = 3600  # a deleted file stays valid as ``after`` of a list for this time


def _visible() -> ColumnElement[bool]:
    return (StoredFile.status == PROCESSED) & or_(StoredFile.expires_at.is_(None), StoredFile.expires_at > now())


FILES = OwnedRows(StoredFile, StoredFile.key_name, "file", "file_id", visible=_visible)


def new_file(
    filename: str, purpose: str, *, blob: str, size: int, expires_after: int | None, key_name: str
) -> StoredFile:
    """Return the record of a complete file, which is not in the store yet."""
    created_at = now()
    if expires_after is None and purpose in (BATCH, BATCH_OUTPUT):
        expires_after = BATCH_FILES_EXPIRE_S
    return StoredFile(
        id=new_id("file-"),
        filename=filename,
        purpose=purpose,
        status=PROCESSED,
        blob=blob,
        bytes=size,
        created_at=created_at,
        expires_at=None if expires_after is None else created_at + expires_after,
        key_name=key_name,
    )


class Files:
    """The records of files in ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def begin_upload(self) -> StoredFile:
        """Add a record for a blob before it is written, so that an interrupted upload expires."""
        record = new_file("", "", blob=new_id("blob-"), size=0, expires_after=_UPLOAD_TIMEOUT_S, key_name="")
        record.status = UPLOADING
        async with self._store.writing() as session:
            session.add(record)
        return record

    async def finish_upload(self, record: StoredFile, done: StoredFile) -> StoredFile:
        """Copy ``done`` to ``record``, except for the blob. Raises ``AlreadyExists`` if the id is in use."""
        names = ("id", "filename", "purpose", "bytes", "created_at", "expires_at", "key_name")
        values = {name: getattr(done, name) for name in names}
        try:
            async with self._store.writing() as session:
                # An earlier attempt with the same idempotency key may have created the file.
                gone = StoredFile.id == done.id, StoredFile.status == DELETED
                await session.execute(delete(StoredFile).where(*gone))
                await session.execute(
                    update(StoredFile).where(StoredFile.id == record.id).values(**values, status=PROCESSED)
                )
        except IntegrityError:
            raise AlreadyExists(f"there is a file {done.id}") from None
        return await self.get(done.id, done.key_name)

    async def get(self, file_id: str, key_name: str) -> StoredFile:
        """Return a file. Raises ``NotFound``, also for another key's."""
        async with self._store.reading() as session:
            return await FILES.find(session, file_id, key_name)

    async def page(
        self, *, key_name: str, after: str | None, limit: int, order: str, purpose: str | None
    ) -> tuple[Sequence[StoredFile], bool]:
        """Return at most ``limit`` files of a key after ``after``, and whether there are more.

        The file ``after`` may have been deleted. ``order`` is ``asc`` or ``desc``.
        """
        wanted = [] if purpose is None else [StoredFile.purpose == purpose]
        async with self._store.reading() as session:
            return await FILES.page(session, key_name, *wanted, after=after, limit=limit, newest_first=order == "desc")

    async def delete(self, file_id: str, key_name: str) -> str:
        """Delete a file. Return its blob. Raises ``NotFound``, and ``FailedPrecondition`` if a Batch job reads it."""
        async with self._store.writing() as session:
            file = await FILES.find(session, file_id, key_name, locked=True)
            reader = await session.scalar(select(StoredBatch.id).where(_reads(file_id)).limit(1))
            if reader is not None:
                raise FailedPrecondition(
                    f"the file {file_id} is the input of {reader}, which still runs; cancel that first, or wait",
                    reason="FILE_IN_USE",
                )
            file.status, file.expires_at = DELETED, now() + _DELETED_KEPT_S
        return file.blob

    async def discard(self, record: StoredFile) -> None:
        """Delete the record of a failed upload."""
        async with self._store.writing() as session:
            await session.execute(delete(StoredFile).where(StoredFile.id == record.id))

    async def forget_expired(self) -> list[str]:
        """Delete expired files that no Batch job reads. Return their blobs."""
        in_use = select(StoredBatch.input_file_id).where(StoredBatch.status.in_(ACTIVE))
        expired = select(StoredFile.seq, StoredFile.blob).where(
            StoredFile.expires_at <= now(), StoredFile.id.not_in(in_use)
        )
        async with self._store.writing() as session:
            locked = (await session.execute(expired.limit(1000).with_for_update(skip_locked=True))).all()
            # Query again under the locks: a Batch job may have started to read a file just before it was locked.
            over = (await session.execute(expired.where(StoredFile.seq.in_([seq for seq, _ in locked])))).all()
            await session.execute(delete(StoredFile).where(StoredFile.seq.in_([seq for seq, _ in over])))
        return [blob for _, blob in over]


def _reads(file_id: str) -> ColumnElement[bool]:
    return (StoredBatch.input_file_id == file_id) & StoredBatch.status.in_(ACTIVE)
