"""The store's tables. Times are Unix time in seconds."""

from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import JSON, BigInteger, Double, Index, Integer, LargeBinary, String, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Bytes = LargeBinary(2**31 - 1)
# SQLite supports AUTOINCREMENT only in a column of type INTEGER.
Serial = BigInteger().with_variant(Integer, "sqlite")

# Status of files. Only processed files are visible to clients.
UPLOADING, PROCESSED, DELETED = "uploading", "processed", "deleted"

QUEUED = "queued"  # status of responses
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"
ACTIVE = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)  # a gateway has to work on it


class Base(DeclarativeBase):
    """Base class of all tables."""

    if TYPE_CHECKING:
        __table__: ClassVar[Table]


class SchemaVersion(Base):
    """The schema version, in one row: see ``database.SCHEMA_VERSION``."""

    __tablename__ = "toka_schema"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    version: Mapped[int] = mapped_column(Integer)


class Listed:
    """The first columns of objects that are listed in the order of ``seq``."""

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True, sort_order=-4)
    id: Mapped[str] = mapped_column(String(64), sort_order=-3)


class Owned(Listed):
    """The first columns of objects that belong to an API key."""

    id: Mapped[str] = mapped_column(String(64), unique=True, sort_order=-3)
    created_at: Mapped[int] = mapped_column(BigInteger, sort_order=-2)
    # Name of the API key that owns the row. Only that key can read it. Empty if authentication is off.
    key_name: Mapped[str] = mapped_column(String(64), default="", server_default="", sort_order=-1)


class Counted:
    """Columns with the numbers of lines that have ended, and of their tokens."""

    completed: Mapped[int] = mapped_column(Integer, default=0)
    failed: Mapped[int] = mapped_column(Integer, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    # Included in the completion tokens. Gateways of older versions do not count them.
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class StoredFile(Owned, Base):
    """A file. Its content is the blob of that name."""

    __tablename__ = "toka_files"

    filename: Mapped[str] = mapped_column(String(1024))
    purpose: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(16))
    blob: Mapped[str] = mapped_column(String(160))
    bytes: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger, index=True)

    __table_args__ = (
        Index("toka_files_key", "key_name", "seq"),
        Index("toka_files_status", "key_name", "status", "seq"),
        Index("toka_files_purpose", "key_name", "status", "purpose", "seq"),
    )


class StoredResponse(Owned, Base):
    """A response of ``/v1/responses``, with all items before its output.

    The items include those of earlier turns, which may be deleted before the response.

    While a background response is ``queued`` or ``in_progress``, the gateway ``owner`` generates it and extends
    ``lease_until``. Any gateway may mark one whose lease has passed as failed.
    """

    __tablename__ = "toka_responses"

    body: Mapped[bytes] = mapped_column(Bytes)  # JSON, as sent to the client
    # JSON: a list of items, each with its own id. Only queries that name this column read it.
    items: Mapped[bytes] = mapped_column(Bytes, deferred=True, deferred_raiseload=True)
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)
    status: Mapped[str] = mapped_column(String(16), default=COMPLETED, server_default=COMPLETED)
    owner: Mapped[str | None] = mapped_column(String(160))
    lease_until: Mapped[float | None] = mapped_column(Double, index=True)  # None: no gateway works on it


class StoredEvents(Base):
    """Events of a background response that is streamed, in the order of ``number``."""

    __tablename__ = "toka_response_events"

    response_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # of the first event
    data: Mapped[bytes] = mapped_column(Bytes)  # server-sent events
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)


class StoredConversation(Owned, Base):
    """A conversation of ``/v1/conversations``. ``expires_at`` moves each time it changes."""

    __tablename__ = "toka_conversations"

    labels: Mapped[dict[str, str] | None] = mapped_column(JSON)  # OpenAI's ``metadata``
    items: Mapped[int] = mapped_column(Integer, default=0)  # number of its items
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # of its items' JSON
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)


class StoredItem(Listed, Base):
    """An item of a conversation. Items are in the order of ``seq``."""

    __tablename__ = "toka_conversation_items"

    conversation_seq: Mapped[int] = mapped_column(BigInteger)
    body: Mapped[bytes] = mapped_column(Bytes)  # JSON

    __table_args__ = (
        Index("toka_conversation_items_id", "conversation_seq", "id", unique=True),
        Index("toka_conversation_items_seq", "conversation_seq", "seq"),
    )


class StoredChat(Owned, Base):
    """A chat completion with ``store: true``, and the messages that it answers."""

    __tablename__ = "toka_chats"

    body: Mapped[bytes] = mapped_column(Bytes)  # JSON, without ``metadata``
    # JSON: a list of messages. Only queries that name this column read it.
    items: Mapped[bytes] = mapped_column(Bytes, deferred=True, deferred_raiseload=True)
    model: Mapped[str] = mapped_column(String(512))
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON)  # OpenAI's ``metadata``
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)

    __table_args__ = (
        Index("toka_chats_key", "key_name", "seq"),
        Index("toka_chats_model", "key_name", "model", "seq"),
        # A filter by labels reads this index instead of the rows. PostgreSQL has no such index for JSON, and stores
        # long values outside its rows.
        Index("toka_chats_labels", "key_name", "seq", "expires_at", "labels").ddl_if(dialect="sqlite"),
    )


class StoredTry(Base):
    """A request with an idempotency key. Sent again, it creates nothing new."""

    __tablename__ = "toka_tries"

    key_name: Mapped[str] = mapped_column(String(64), primary_key=True)  # as in ``_key_name``
    idempotency_key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))  # of the request
    name: Mapped[str] = mapped_column(String(64))  # part of the id of the object that it creates
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)


class StoredBatch(Owned, Counted, Base):
    """A Batch job. ``owner`` validates or finishes it until ``lease_until``. ``Chunk`` has the leases of its lines."""

    __tablename__ = "toka_batches"

    pool: Mapped[str] = mapped_column(String(512))  # gateways of this pool serve its model
    endpoint: Mapped[str] = mapped_column(String(128))
    input_file_id: Mapped[str] = mapped_column(String(64), index=True)
    input_blob: Mapped[str] = mapped_column(String(160))
    completion_window: Mapped[str] = mapped_column(String(16))
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON)  # OpenAI's ``metadata``
    fairness_key: Mapped[str] = mapped_column(String(64))
    output_expires_after: Mapped[int] = mapped_column(BigInteger)  # seconds
    model: Mapped[str | None] = mapped_column(String(512))  # of the first line

    status: Mapped[str] = mapped_column(String(16), index=True)
    ending: Mapped[str | None] = mapped_column(String(16))  # while finalizing: the status that comes next
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    in_progress_at: Mapped[int | None] = mapped_column(BigInteger)
    finalizing_at: Mapped[int | None] = mapped_column(BigInteger)
    completed_at: Mapped[int | None] = mapped_column(BigInteger)
    failed_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelling_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelled_at: Mapped[int | None] = mapped_column(BigInteger)
    expired_at: Mapped[int | None] = mapped_column(BigInteger)
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))

    # The counts are set at the end. While lines run, they are in their chunks.
    total: Mapped[int] = mapped_column(Integer, default=0)

    owner: Mapped[str | None] = mapped_column(String(160))
    lease_until: Mapped[float] = mapped_column(Double, default=0.0)
    attempt: Mapped[int] = mapped_column(Integer, default=0)  # number of leases so far, part of the names of its blobs
    purged: Mapped[bool] = mapped_column(default=False)  # its chunks and results are deleted

    __table_args__ = (
        Index("toka_batches_key", "key_name", "seq"),
        Index("toka_batches_turns", "fairness_key", "status", "seq"),
        Index("toka_batches_input", "input_file_id", "status"),
        Index("toka_batches_unpurged", "purged", "status"),
    )


class Chunk(Counted, Base):
    """Lines of a Batch job that are leased together. Only ``owner`` may write their results."""

    __tablename__ = "toka_chunks"

    batch_seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # in the order of execution
    lines: Mapped[bytes] = mapped_column(Bytes)  # int64 [count, 3]: line number, offset in the file, bytes
    count: Mapped[int] = mapped_column(Integer)
    done: Mapped[bool] = mapped_column(default=False)
    done_at: Mapped[float | None] = mapped_column(Double)
    owner: Mapped[str | None] = mapped_column(String(160))
    lease_until: Mapped[float] = mapped_column(Double, default=0.0)

    __table_args__ = (
        Index("toka_chunks_open", "batch_seq", "done", "number"),
        Index("toka_chunks_owner", "owner"),
    )


class LineResult(Base):
    """The result of one line. The primary key ensures that a line has only one."""

    __tablename__ = "toka_results"

    batch_seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    line: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    ok: Mapped[bool]
    body: Mapped[bytes] = mapped_column(Bytes)  # the line of the output or error file, with its newline
