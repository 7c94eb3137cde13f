"""Validates the input file of a Batch job, and sorts its lines into chunks whose prompts begin alike."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing

import numpy as np

from services.gateway.batch.lines import LineChecker, LineTooLong, RawLine, read_lines
from services.gateway.store.blobs import Blobs
from services.gateway.store.leases import Leases
from services.gateway.store.tables import StoredBatch

CHUNK_LINES = 64
WINDOW_LINES = 8192  # lines that are sorted together: far more than run at once, and few enough for memory
_CHECKED_AT_ONCE = 64  # lines that a thread checks before other validations and the event loop have their turn

Turn = Callable[[], AbstractAsyncContextManager[None]]


async def validate(batch: StoredBatch, leases: Leases, blobs: Blobs, max_body_bytes: int, turn: Turn) -> None:
    """Start ``batch``, or fail it with the errors of its lines.

    ``turn`` returns a context in which the validation computes. One validation of the gateway computes at a time, and
    they take turns after every few lines. Raises ``LeaseLost``, or ``Unavailable`` if the store does not answer.
    """
    await leases.begin_validation(batch)
    checker = LineChecker(batch.endpoint)
    window: list[tuple[bytes, int, int, int]] = []  # sort key, line number, offset, bytes
    chunks = 0
    try:
        async with aclosing(read_lines(blobs, batch.input_blob, 2 * max_body_bytes, _CHECKED_AT_ONCE)) as blocks:
            async for lines in blocks:
                async with turn():
                    window += await blobs.in_thread(_check, checker, lines)
                if checker.is_hopeless:
                    break
                if len(window) >= WINDOW_LINES and not checker.errors:
                    chunks += await _store(batch, leases, blobs, chunks, window, turn)
                    window.clear()
    except LineTooLong as error:
        checker.fail("line_too_large", f"this line is larger than {2 * max_body_bytes} bytes", error.number)
    if window and not checker.errors:
        await _store(batch, leases, blobs, chunks, window, turn)
    if not checker.total and not checker.errors:
        checker.fail("empty_file", "the file has no lines", None)
    await leases.end_validation(
        batch, total=0 if checker.errors else checker.total, model=checker.model, errors=checker.errors or None
    )


def _check(checker: LineChecker, lines: list[RawLine]) -> list[tuple[bytes, int, int, int]]:
    checked = ((checker.check(line), line) for line in lines)
    return [(key, line.number, line.offset, len(line.text)) for key, line in checked if key is not None]


async def _store(
    batch: StoredBatch,
    leases: Leases,
    blobs: Blobs,
    first: int,
    window: list[tuple[bytes, int, int, int]],
    turn: Turn,
) -> int:
    """Store the lines in ``window`` as chunks with numbers from ``first``. Returns the number of chunks."""
    async with turn():
        chunks = await blobs.in_thread(_arrange, window)
    await leases.add_chunks(batch, first, chunks)
    return len(chunks)


def _arrange(window: list[tuple[bytes, int, int, int]]) -> list[np.ndarray]:
    """Sort the lines by their keys. Returns chunks, each int64 [count, 3]: line number, offset, bytes."""
    window.sort()
    lines = np.array([line for _, *line in window], np.int64)
    return [lines[start : start + CHUNK_LINES] for start in range(0, len(lines), CHUNK_LINES)]
