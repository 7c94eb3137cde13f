"""Keeps every plan and every result of a scheduler in files."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import structlog
from google.protobuf.proto import serialize_length_prefixed

from services.common.errors import InvalidRequest
from services.common.host.private_files import warn_if_shared
from services.scheduler.record.message_sizes import plan_size, result_size
from tokasaurus.worker.v1 import plan_pb2, record_pb2, worker_pb2

log = structlog.get_logger(__name__)

SUFFIX = ".tkrec"
_MIB = 1 << 20
_MOST_WAITING_BYTES = 256 * _MIB
_ENTRY_BYTES = 1024  # of what is around a message: roughly
_CLOSE_S = 10.0


def _create(path: Path) -> BinaryIO:
    return path.open("xb")


class Recorder:
    """Called on the step loop's thread, which it never keeps waiting: a thread of its own writes.

    Each connection to a worker has a file of its own in ``directory``, ``plans-<UTC time>-<process id>.tkrec``: a
    sequence of ``Record`` messages, each behind its length as a varint. When the disk does not keep up or fails, the
    recording ends for good with one error in the log: a file may be cut short, and says so if it still can, but it
    never has a hole.
    """

    def __init__(
        self,
        directory: str,
        scheduler_id: str = "",
        *,
        most_waiting_bytes: int = _MOST_WAITING_BYTES,
        open_file: Callable[[Path], BinaryIO] = _create,
    ) -> None:
        """``most_waiting_bytes``: of messages that may wait for the disk; the last may go beyond. ``open_file``
        creates the file of a connection. ``InvalidRequest`` when it may not write there.
        """
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            writable = os.access(self._directory, os.W_OK | os.X_OK)
        except OSError as error:
            raise InvalidRequest(
                f"flag record_plans={directory}: {error.strerror}; name a directory", field="record_plans"
            ) from error
        if not writable:
            raise InvalidRequest(
                f"flag record_plans={directory}: this process may not write there; name another directory",
                field="record_plans",
            )
        warn_if_shared("recordings", [self._directory])
        self._scheduler_id = scheduler_id
        self._most_waiting_bytes = most_waiting_bytes
        self._open_file = open_file
        self._put_bytes = 0  # so far; the step loop's
        self._written_bytes = 0  # of them; the writer's
        self._waiting: queue.SimpleQueue[tuple[str, dict[str, Any], int] | None] = queue.SimpleQueue()
        self._ended = False  # no entry is taken any more
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of messages that are not written yet."""
        return self._put_bytes - self._written_bytes

    # -- on the step loop's thread; what is given must not change afterwards

    def connected(self, info: worker_pb2.WorkerInfo, plans_in_flight: int) -> None:
        """A worker that holds nothing is there: a new file begins."""
        self._put(
            "connected",
            0,
            info=info,
            plans_in_flight=plans_in_flight,
            scheduler_id=self._scheduler_id,
            connected_ns=time.time_ns(),
        )

    def plan(self, message: plan_pb2.StepPlan, admitted_ids: Sequence[str], released_ids: Sequence[str]) -> None:
        """A plan was sent. The request ids stand beside its admissions and its releases."""
        ids_bytes = sum(map(len, admitted_ids)) + sum(map(len, released_ids))
        self._put(
            "plan",
            plan_size(message) + ids_bytes,
            plan=message,
            sent_ns=time.time_ns(),
            admitted_ids=admitted_ids,
            released_ids=released_ids,
        )

    def result(self, message: plan_pb2.StepResult) -> None:
        """The oldest plan without an answer was answered."""
        self._put("result", result_size(message), result=message, received_ns=time.time_ns())

    def disconnected(self, reason: str) -> None:
        """The worker is gone: its file ends."""
        self._put("disconnected", 0, reason=reason)

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("the disk does not answer: the end of the recording is lost", directory=str(self._directory))

    def _put(self, kind: str, size: int, **fields: Any) -> None:
        """``size``: bytes of the messages in ``fields``. The writer makes the ``Record``: that copies the messages."""
        if self._ended:
            return
        waiting = self.waiting_bytes
        if waiting < self._most_waiting_bytes:
            self._put_bytes += size + _ENTRY_BYTES
            self._waiting.put((kind, fields, size + _ENTRY_BYTES))
            return
        self._ended = True
        most = self._most_waiting_bytes / _MIB
        reason = f"the disk does not keep up: {waiting / _MIB:.1f} MiB of messages wait for it, at most {most:.1f} may"
        self._waiting.put(("cut", {"reason": reason}, 0))
        log.error("the recording of plans ends here", directory=str(self._directory), reason=reason)

    # -- on the writer's thread

    def _write_all(self) -> None:
        file: BinaryIO | None = None
        try:
            while (entry := self._waiting.get()) is not None:
                kind, fields, size = entry
                if kind == "connected":
                    if file is not None:
                        file.close()
                    file = self._open()
                if file is not None:
                    _append(record_pb2.Record(**{kind: fields}), file)
                self._written_bytes += size
                if file is None:
                    continue
                if kind in ("disconnected", "cut"):
                    file.close()
                    file = None
                elif self._waiting.empty():
                    file.flush()
            if file is not None:
                _append(record_pb2.Record(disconnected={"reason": "the scheduler stopped"}), file)
                file.close()
        except Exception as error:
            self._fail(file, error)

    def _open(self) -> BinaryIO:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._directory / f"plans-{now}-{os.getpid()}{SUFFIX}"
        log.info("recording plans", file=str(path))
        return self._open_file(path)

    def _fail(self, file: BinaryIO | None, error: Exception) -> None:
        """What waits and what follows is let go; the file may end in the middle of an entry."""
        self._ended = True
        log.error("the recording of plans ends here", directory=str(self._directory), reason=str(error))
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        while self._waiting.get() is not None:  # until `close`
            pass


def _append(record: record_pb2.Record, file: BinaryIO) -> None:
    serialize_length_prefixed(record, file)  # type: ignore[arg-type]  # any file does, not only a BytesIO
