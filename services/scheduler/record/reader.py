"""Reads the files of ``Recorder`` entry by entry, as a file may be larger than memory."""

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from google.protobuf.message import DecodeError

from services.scheduler.record.recorder import SUFFIX
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import record_pb2

_LONGEST_VARINT = 10  # bytes
RECORD = "a recording (*.tkrec) that a scheduler wrote with record_plans=, or a directory of them"
TORN = "it ends in the middle of an entry"
OPEN = "it has no end: it is still being written, or its scheduler was killed"


class RecordingError(Exception):
    """The file is not a recording, or is damaged. The message has the file and the position."""


class _Torn(Exception):
    """The file ends within an entry."""


class RecordedStep(NamedTuple):
    """A plan and its result."""

    plan: record_pb2.PlanRecord
    result: record_pb2.ResultRecord | None  # None = no result before the end of the recording
    unanswered: int  # plans in flight after this plan was sent
    weights: weights_pb2.Weights | None = None  # new weights since the previous plan, or None


class Recording:
    """A file with one connection to one worker. ``steps`` may be called repeatedly."""

    def __init__(self, path: Path) -> None:
        """Open the recording ``path``. Raises ``RecordingError`` if it does not begin like a recording."""
        self.path = path
        self.ending = ""  # the reason for the end, set when ``steps`` is exhausted
        first = next(self._entries(), None)
        if first is None or first.WhichOneof("entry") != "connected":
            raise RecordingError(f"{path}: no recording: it does not begin with the connection to a worker")
        self.connected: record_pb2.Connected = first.connected
        self.info = first.connected.info
        for name in ("page_size", "page_count", "max_slots", "max_context_tokens"):
            if not getattr(self.info, name):
                raise RecordingError(f"{path}: damaged: it begins with a worker of {name}=0")

    def steps(self) -> Iterator[RecordedStep]:
        """Yield the steps in order. The last steps may have no result. Raises ``RecordingError``."""
        waiting: deque[RecordedStep] = deque()  # in flight, without their results
        weights: weights_pb2.Weights | None = None
        self.ending = OPEN
        for entry in islice(self._entries(), 1, None):
            match entry.WhichOneof("entry"):
                case "plan":
                    waiting.append(RecordedStep(self._checked(entry.plan), None, len(waiting) + 1, weights))
                    weights = None
                case "result":
                    expected = waiting[0].plan.plan.step if waiting else None
                    if entry.result.result.step != expected:
                        raise RecordingError(
                            f"{self.path}: the result of step {entry.result.result.step} where that of {expected} is"
                            " due: the file is damaged, or the worker returned results in another order"
                        )
                    yield waiting.popleft()._replace(result=entry.result)
                case "weights":
                    weights = entry.weights.weights
                case "disconnected":
                    self.ending = f"disconnected: {entry.disconnected.reason}"
                case "cut":
                    self.ending = f"cut short: {entry.cut.reason}"
                case kind:
                    raise RecordingError(f"{self.path}: an entry ({kind}) where a plan or a result is due")
        yield from waiting

    def _checked(self, record: record_pb2.PlanRecord) -> record_pb2.PlanRecord:
        plan = record.plan
        if (len(record.admitted_ids), len(record.released_ids)) != (len(plan.admissions), len(plan.release_slots)):
            raise RecordingError(f"{self.path}: damaged: step {plan.step} has request ids of other sequences")
        return record

    def _entries(self) -> Iterator[record_pb2.Record]:
        with self._open() as file:
            while True:
                at = file.tell()
                try:
                    payload = _next_payload(file)
                    if payload is None:
                        return
                    yield record_pb2.Record.FromString(payload)
                except _Torn:
                    self.ending = TORN
                    return
                except (DecodeError, ValueError) as error:
                    raise RecordingError(f"{self.path}: damaged, or no recording, at byte {at}: {error}") from error

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise RecordingError(f"{self.path}: {error.strerror}") from error


def find_recordings(path: str) -> list[Path]:
    """Return ``path``, or the recordings in the directory ``path``, oldest first, without reading them.

    Raises ``RecordingError`` if there is none.
    """
    given = Path(path)
    if not given.exists():
        raise RecordingError(f"{path}: there is no such file or directory")
    paths = sorted(given.glob(f"*{SUFFIX}")) if given.is_dir() else [given]
    if not paths:
        raise RecordingError(f"{path}: no recordings (*{SUFFIX}) in this directory")
    return paths


def _next_payload(file: BinaryIO) -> bytes | None:
    """Return the bytes of the next entry, or None at the end of the file."""
    length, shift = 0, 0
    while True:
        byte = file.read(1)
        if not byte:
            if shift:
                raise _Torn
            return None
        length |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
        if shift >= 7 * _LONGEST_VARINT:
            raise ValueError("a length of more than ten bytes")
    if length > os.fstat(file.fileno()).st_size - file.tell():
        raise _Torn
    return file.read(length)
