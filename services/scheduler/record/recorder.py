"""Writes the plans and results of a scheduler to files."""

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

from services.common.boundaries import errors_to
from services.common.errors import InvalidRequest
from services.common.host.private_files import warn_if_shared
from services.scheduler.record.message_sizes import message_size
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import plan_pb2, record_pb2, worker_pb2

log = structlog.get_logger(__name__)

SUFFIX = ".tkrec"
_MIB = 1 << 20
_MOST_WAITING_BYTES = 256 * _MIB
_ENTRY_BYTES = 1024  # approximate memory of an entry without its message
_CLOSE_S = 10.0


def _create(path: Path) -> BinaryIO:
    return path.open("xb")


class Recorder:
    """Writer of recordings. Its methods are called on the step loop's thread, and its own thread writes.

    Each connection to a worker has its own file in ``directory``, ``plans-<UTC time>-<process id>.tkrec``. It is a
    sequence of ``Record`` messages, each preceded by its length as a varint. If the disk fails or is too slow, the
    recording ends until the scheduler restarts, with an error in the log. The file then lacks its end, and says so in
    its last entry if possible. No entries are missing in between.
    """

    def __init__(
        self,
        directory: str,
        scheduler_id: str = "",
        *,
        most_waiting_bytes: int = _MOST_WAITING_BYTES,
        open_file: Callable[[Path], BinaryIO] = _create,
    ) -> None:
        """Start the writer. ``open_file`` creates the file of a connection.

        ``most_waiting_bytes`` is the size of waiting messages at which recording ends. Raises ``InvalidRequest`` if the
        process may not write to ``directory``.
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
        self._put_bytes = 0  # total so far; written by the step loop
        self._written_bytes = 0  # total so far; written by the writer
        self._waiting: queue.SimpleQueue[tuple[str, dict[str, Any], int] | None] = queue.SimpleQueue()
        self._ended = False  # further entries are dropped
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of messages that are not written yet."""
        return self._put_bytes - self._written_bytes

    # -- on the step loop's thread; arguments must not change afterwards

    def connected(self, info: worker_pb2.WorkerInfo, plans_in_flight: int) -> None:
        """Begin a new file for the connection to a worker."""
        self._put(
            "connected",
            0,
            info=info,
            plans_in_flight=plans_in_flight,
            scheduler_id=self._scheduler_id,
            connected_ns=time.time_ns(),
        )

    def plan(self, message: plan_pb2.StepPlan, admitted_ids: Sequence[str], released_ids: Sequence[str]) -> None:
        """Record a plan. The request ids are those of its admissions and releases, in their order."""
        ids_bytes = sum(map(len, admitted_ids)) + sum(map(len, released_ids))
        self._put(
            "plan",
            message_size(message) + ids_bytes,
            plan=message,
            sent_ns=time.time_ns(),
            admitted_ids=admitted_ids,
            released_ids=released_ids,
        )

    def result(self, message: plan_pb2.StepResult) -> None:
        """Record the result of the oldest plan in flight."""
        self._put("result", message_size(message), result=message, received_ns=time.time_ns())

    def weights_changed(self, weights: weights_pb2.Weights) -> None:
        """Record an update of the weights between two plans, while no plan is in flight."""
        self._put("weights", message_size(weights), weights=weights)

    def disconnected(self, reason: str) -> None:
        """End the file, because the worker was lost for ``reason``."""
        self._put("disconnected", 0, reason=reason)

    def close(self) -> None:
        """Write the waiting entries, and stop the writer."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("the disk does not respond: the end of the recording is lost", directory=str(self._directory))

    def _put(self, kind: str, size: int, **fields: Any) -> None:
        """Queue an entry with messages of ``size`` bytes. The writer builds the ``Record``, which copies them."""
        if self._ended:
            return
        waiting = self.waiting_bytes
        if waiting < self._most_waiting_bytes:
            self._put_bytes += size + _ENTRY_BYTES
            self._waiting.put((kind, fields, size + _ENTRY_BYTES))
            return
        self._ended = True
        most = self._most_waiting_bytes / _MIB
        reason = f"the disk is too slow: {waiting / _MIB:.1f} MiB of messages wait, and {most:.1f} MiB are allowed"
        self._waiting.put(("cut", {"reason": reason}, 0))
        log.error("the recording of plans ends here", directory=str(self._directory), reason=reason)

    # -- on the writer's thread

    def _write_all(self) -> None:
        file: BinaryIO | None = None
        with errors_to(lambda error: self._fail(file, error)):
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

    def _open(self) -> BinaryIO:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._directory / f"plans-{now}-{os.getpid()}{SUFFIX}"
        log.info("recording plans", file=str(path))
        return self._open_file(path)

    def _fail(self, file: BinaryIO | None, error: Exception) -> None:
        """End recording after ``error``, and drop all entries. The file may end in the middle of an entry."""
        self._ended = True
        log.error("the recording of plans ends here", directory=str(self._directory), reason=str(error))
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        while self._waiting.get() is not None:  # until `close`
            pass


def _append(record: record_pb2.Record, file: BinaryIO) -> None:
    serialize_length_prefixed(record, file)  # type: ignore[arg-type]  # any binary file is possible, not only a BytesIO
