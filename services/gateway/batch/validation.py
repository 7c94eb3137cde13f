"""From an input file to chunks of lines: each line checked, and lines with a common beginning put together."""

from collections.abc import AsyncIterator

import numpy as np

from services.gateway.batch.blobs import Blobs
from services.gateway.batch.leases import Leases
from services.gateway.batch.lines import LineChecker, LineTooLong, RawLine, read_lines
from services.gateway.batch.tables import StoredBatch

CHUNK_LINES = 64
# Lines are put in order within so many: far more than run at once, and no more than memory should hold.
WINDOW_LINES = 8192
_CHECKED_AT_ONCE = 64  # in a thread; between two such the event loop has its turn


async def validate(batch: StoredBatch, leases: Leases, blobs: Blobs, max_body_bytes: int) -> None:
    """Make ``batch`` run, or fail. Raises ``LeaseLost``, or ``Unavailable`` when the store does not answer."""
    await leases.begin_validation(batch)
    checker = LineChecker(batch.endpoint)
    window: list[tuple[bytes, int, int, int]] = []  # sort key, line number, offset, bytes
    chunks = 0
    try:
        async for lines in _some_at_once(read_lines(blobs, batch.input_blob, 2 * max_body_bytes)):
            window += await blobs.in_thread(_check, checker, lines)
            if len(window) >= WINDOW_LINES and not checker.errors:
                chunks += await _store(batch, leases, blobs, chunks, window)
                window.clear()
    except LineTooLong as error:
        checker.fail("line_too_large", f"this line is larger than {2 * max_body_bytes} bytes", error.number)
    if window and not checker.errors:
        await _store(batch, leases, blobs, chunks, window)
    if not checker.total and not checker.errors:
        checker.fail("empty_file", "the file has no lines", None)
    await leases.end_validation(
        batch, total=0 if checker.errors else checker.total, model=checker.model, errors=checker.errors or None
    )


def _check(checker: LineChecker, lines: list[RawLine]) -> list[tuple[bytes, int, int, int]]:
    keys = [checker.check(line) for line in lines]
    return [
        (key, line.number, line.offset, len(line.text))
        for key, line in zip(keys, lines, strict=True)
        if key is not None
    ]


async def _store(
    batch: StoredBatch, leases: Leases, blobs: Blobs, first: int, window: list[tuple[bytes, int, int, int]]
) -> int:
    """Chunks of the lines in ``window``; how many."""
    chunks = await blobs.in_thread(_arrange, window)
    await leases.add_chunks(batch, first, chunks)
    return len(chunks)


def _arrange(window: list[tuple[bytes, int, int, int]]) -> list[np.ndarray]:
    """In the order of their keys, cut into chunks. int64 [count, 3]: line number, offset, bytes."""
    window.sort()
    lines = np.array([line for _, *line in window], np.int64)
    return [lines[start : start + CHUNK_LINES] for start in range(0, len(lines), CHUNK_LINES)]


async def _some_at_once(blocks: AsyncIterator[list[RawLine]]) -> AsyncIterator[list[RawLine]]:
    async for lines in blocks:
        for start in range(0, len(lines), _CHECKED_AT_ONCE):
            yield lines[start : start + _CHECKED_AT_ONCE]
