"""The store's tables. Times are Unix time in seconds."""

from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import JSON, BigInteger, Double, Index, Integer, LargeBinary, String, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Bytes = LargeBinary(2**31 - 1)
# SQLite counts up by itself in a column of this very type only.
Serial = BigInteger().with_variant(Integer, "sqlite")

# Of files; nobody is shown the others.
UPLOADING, PROCESSED, DELETED = "uploading", "processed", "deleted"

QUEUED = "queued"  # of responses
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"
ACTIVE = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)  # somebody has to work on it


class Base(DeclarativeBase):
    """Every table here."""

    if TYPE_CHECKING:
        __table__: ClassVar[Table]


class SchemaVersion(Base):
    """One row: how many of the migrations were made."""

    __tablename__ = "toka_schema"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    version: Mapped[int] = mapped_column(Integer)


def _key_name() -> Mapped[str]:
    """Of the API key that made it, to whose callers alone it is there; empty where keys are not asked for."""
    return mapped_column(String(64), default="", server_default="")


def _reasoning_tokens() -> Mapped[int]:
    """Of the completion tokens; what gateways of an older version add to does not count them."""
    return mapped_column(BigInteger, default=0, server_default="0")


class StoredFile(Base):
    """A file. Its content is the blob of that name."""

    __tablename__ = "toka_files"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    filename: Mapped[str] = mapped_column(String(1024))
    purpose: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(16))
    blob: Mapped[str] = mapped_column(String(160))
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger, index=True)
    key_name: Mapped[str] = _key_name()

    __table_args__ = (
        Index("toka_files_key", "key_name", "seq"),
        Index("toka_files_status", "key_name", "status", "seq"),
        Index("toka_files_purpose", "key_name", "status", "purpose", "seq"),
    )


class StoredResponse(Base):
    """A response of ``/v1/responses``, and the conversation that it answers.

    While a background response is ``queued`` or ``in_progress``, the gateway ``owner`` generates it and extends
    ``lease_until``. Any gateway may mark one whose lease has passed as failed.
    """

    __tablename__ = "toka_responses"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    body: Mapped[bytes] = mapped_column(Bytes)  # JSON, as it was told
    items: Mapped[bytes] = mapped_column(Bytes)  # JSON: a list of items
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)
    key_name: Mapped[str] = _key_name()
    status: Mapped[str] = mapped_column(String(16), default=COMPLETED, server_default=COMPLETED)
    owner: Mapped[str | None] = mapped_column(String(160))
    lease_until: Mapped[float | None] = mapped_column(Double, index=True)  # None: no gateway works on it


class StoredEvents(Base):
    """Events of a background response that is streamed, in the order of ``number``."""

    __tablename__ = "toka_response_events"

    response_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # of its first event
    data: Mapped[bytes] = mapped_column(Bytes)  # server-sent events
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)


class StoredConversation(Base):
    """A conversation of ``/v1/conversations``. ``expires_at`` moves each time it changes."""

    __tablename__ = "toka_conversations"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON)  # OpenAI's ``metadata``
    items: Mapped[int] = mapped_column(Integer, default=0)  # number of its items
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # of its items' JSON
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)
    key_name: Mapped[str] = _key_name()


class StoredItem(Base):
    """An item of a conversation. Items are in the order of ``seq``."""

    __tablename__ = "toka_conversation_items"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    conversation_seq: Mapped[int] = mapped_column(BigInteger)
    id: Mapped[str] = mapped_column(String(64))
    body: Mapped[bytes] = mapped_column(Bytes)  # JSON

    __table_args__ = (
        Index("toka_conversation_items_id", "conversation_seq", "id", unique=True),
        Index("toka_conversation_items_seq", "conversation_seq", "seq"),
    )


class StoredChat(Base):
    """A chat completion with ``store: true``, and the messages that it answers."""

    __tablename__ = "toka_chats"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    body: Mapped[bytes] = mapped_column(Bytes)  # JSON, without ``metadata``
    items: Mapped[bytes] = mapped_column(Bytes)  # JSON: a list of messages
    model: Mapped[str] = mapped_column(String(512))
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON)  # OpenAI's ``metadata``
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)
    key_name: Mapped[str] = _key_name()

    __table_args__ = (
        Index("toka_chats_key", "key_name", "seq"),
        Index("toka_chats_model", "key_name", "model", "seq"),
        # A filter by labels reads this index instead of the rows. PostgreSQL cannot index JSON so, and keeps long
        # values out of its rows anyway.
        Index("toka_chats_labels", "key_name", "seq", "expires_at", "labels").ddl_if(dialect="sqlite"),
    )


class StoredTry(Base):
    """A request with an idempotency key: whoever sends it again makes nothing new."""

    __tablename__ = "toka_tries"

    key_name: Mapped[str] = mapped_column(String(64), primary_key=True)  # as above
    idempotency_key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))  # of the request
    name: Mapped[str] = mapped_column(String(64))  # in the id of what it makes
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)


class StoredBatch(Base):
    """A batch. ``owner`` validates or finishes it until ``lease_until``; its lines are leased by ``Chunk``."""

    __tablename__ = "toka_batches"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
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
    created_at: Mapped[int] = mapped_column(BigInteger)
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

    # Known in the end; while lines run, their chunks know.
    total: Mapped[int] = mapped_column(Integer, default=0)
    completed: Mapped[int] = mapped_column(Integer, default=0)
    failed: Mapped[int] = mapped_column(Integer, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    reasoning_tokens: Mapped[int] = _reasoning_tokens()

    owner: Mapped[str | None] = mapped_column(String(160))
    lease_until: Mapped[float] = mapped_column(Double, default=0.0)
    attempt: Mapped[int] = mapped_column(
        Integer, default=0
    )  # leases so far; blobs that it writes have it in their name
    purged: Mapped[bool] = mapped_column(default=False)  # its chunks and results are gone
    key_name: Mapped[str] = _key_name()

    __table_args__ = (
        Index("toka_batches_key", "key_name", "seq"),
        Index("toka_batches_turns", "fairness_key", "status", "seq"),
        Index("toka_batches_input", "input_file_id", "status"),
        Index("toka_batches_unpurged", "purged", "status"),
    )


class Chunk(Base):
    """Some lines of a batch, leased together. Their results may be written by ``owner`` only."""

    __tablename__ = "toka_chunks"

    batch_seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # in the order of execution
    lines: Mapped[bytes] = mapped_column(Bytes)  # int64 [count, 3]: line number, offset in the file, bytes
    count: Mapped[int] = mapped_column(Integer)
    done: Mapped[bool] = mapped_column(default=False)
    done_at: Mapped[float | None] = mapped_column(Double)
    owner: Mapped[str | None] = mapped_column(String(160))
    lease_until: Mapped[float] = mapped_column(Double, default=0.0)
    completed: Mapped[int] = mapped_column(Integer, default=0)
    failed: Mapped[int] = mapped_column(Integer, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    reasoning_tokens: Mapped[int] = _reasoning_tokens()

    __table_args__ = (
        Index("toka_chunks_open", "batch_seq", "done", "number"),
        Index("toka_chunks_owner", "owner"),
    )


class LineResult(Base):
    """What became of one line: the key is why no line has two."""

    __tablename__ = "toka_results"

    batch_seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    line: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    ok: Mapped[bool]
    body: Mapped[bytes] = mapped_column(Bytes)  # the line of the output or error file, with its newline
