"""Writes a safetensors file from chunks of its tensors that arrive in any order."""

import json
import os
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from services.common.boundaries import undo_on_error
from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import StoredTensor

_MOST_RANGES = 65_536  # of a tensor
_LENGTH_BYTES = 8  # of the number before the header
_ALIGNMENT = 8  # bytes, of the first tensor


class Coverage:
    """The bytes of a tensor that have arrived, as ranges that do not touch each other."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # ascending
        self._ends: list[int] = []  # exclusive, of the same ranges

    def add(self, start: int, end: int) -> bool:
        """Add the bytes from ``start`` up to, not including, ``end``, which is larger.

        Return False, and add nothing, if one of them was added before.
        """
        index = bisect_right(self._starts, start)  # of the first range after ``start``
        if (index and self._ends[index - 1] > start) or (index < len(self._starts) and self._starts[index] < end):
            return False
        follows = index > 0 and self._ends[index - 1] == start
        precedes = index < len(self._starts) and self._starts[index] == end
        if follows and precedes:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif follows:
            self._ends[index - 1] = end
        elif precedes:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
        return True

    @property
    def ranges(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    @property
    def first_missing(self) -> int:
        """The offset of the first byte that has not arrived."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0


class TensorFile:
    """A safetensors file while it is written. Its context manager closes it. Used by one thread."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """Create ``path`` with ``tensors``. Raises ``OSError`` if it exists or cannot be written."""
        self._tensors = tensors
        self._arrived = {name: Coverage() for name in tensors}
        self._starts: dict[str, int] = {}  # in bytes, from the end of the header
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, stored in tensors.items():
            end = at + stored.nbytes
            header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": (at, end)}
            self._starts[name] = at
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header_bytes = _LENGTH_BYTES + len(text)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with undo_on_error(os.close, self._file):
            self._write(0, len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write ``data`` at ``offset`` bytes of the tensor ``name``. Raises ``InvalidRequest`` and ``OSError``."""
        stored = self._tensors.get(name)
        if stored is None:
            raise InvalidRequest(
                f"a chunk is of {name[:256]!r}, which is not in the header; add it there, or leave it out",
                field="chunk.name",
            )
        end = offset + len(data)
        if not data:
            raise InvalidRequest(f"{name}: a chunk has no bytes; leave it out", field="chunk.data")
        if end > stored.nbytes:
            raise InvalidRequest(
                f"{name}: a chunk has the bytes {offset} to {end}, but the header gives it {stored.nbytes} bytes",
                field="chunk.offset",
            )
        arrived = self._arrived[name]
        if not arrived.add(offset, end):
            raise InvalidRequest(
                f"{name}: a byte from {offset} to {end} arrived before; send each byte once", field="chunk.offset"
            )
        if arrived.ranges > _MOST_RANGES:
            raise InvalidRequest(
                f"{name}: its chunks leave more than {_MOST_RANGES} gaps; send larger chunks, or send them in order",
                field="chunk.offset",
            )
        self._write(self._header_bytes + self._starts[name] + offset, data)

    def check(self) -> None:
        """Raise ``InvalidRequest`` if a byte has not arrived."""
        for name, stored in self._tensors.items():
            if (missing := self._arrived[name].first_missing) < stored.nbytes:
                raise InvalidRequest(
                    f"{name}: the upload ended without byte {missing} of {stored.nbytes}; send every byte once",
                    field="chunk.name",
                )

    def _write(self, at: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written
