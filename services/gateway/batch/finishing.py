"""The end of a Batch job: its results become the output file and the error file."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.common.boundaries import undo_on_error_async
from services.common.errors import Internal
from services.gateway.batch.lines import parse, read_lines
from services.gateway.batch.requests import error_line
from services.gateway.store.batches import Counts
from services.gateway.store.blobs import Blobs, BlobWriter
from services.gateway.store.files import BATCH_OUTPUT, new_file
from services.gateway.store.leases import Leases
from services.gateway.store.tables import CANCELLED, EXPIRED, StoredBatch, StoredFile

_RESULTS_AT_ONCE = 64
_KINDS = ("output", "error")
# Code and message for requests that were not run, by the reason why the Batch job ended.
_NOT_RUN = {
    EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}


async def finish(batch: StoredBatch, leases: Leases, blobs: Blobs) -> None:
    """Write the two files, in the order of the input, and end ``batch``.

    Raises ``LeaseLost``, ``Unavailable`` if the store does not answer, or ``Internal`` if lines are missing.
    """
    counts = await leases.close_chunks(batch)
    names = _blob_names(batch, batch.attempt)
    writers = [await blobs.create(name) for name in names]
    async with undo_on_error_async(_abandon, blobs, dict(zip(names, writers, strict=True))):
        written = await _write(batch, leases, blobs, counts, *writers)
    for writer in writers:
        await writer.close()
    if written != counts.total:
        raise Internal(f"batch {batch.id} has {counts.total} lines, and {written} were written")
    files = [_record(batch, *each) for each in zip(_KINDS, writers, names, strict=True)]
    await leases.finish(batch, counts, *files)
    for file, name in zip(files, names, strict=True):
        if file is None:
            await blobs.delete(name)
    for attempt in range(1, batch.attempt):  # gateways that exited meanwhile have left their files
        for name in _blob_names(batch, attempt):
            await blobs.delete(name)


async def _abandon(blobs: Blobs, writers: dict[str, BlobWriter]) -> None:
    """Delete the blobs, which are not whole."""
    for name, writer in writers.items():
        await writer.abandon()
        await blobs.delete(name)


async def _write(
    batch: StoredBatch, leases: Leases, blobs: Blobs, counts: Counts, output: BlobWriter, error: BlobWriter
) -> int:
    """Write a line for each line of the input file. Return the number of lines written."""
    written = 0
    async with aclosing(_results(batch, leases)) as results:
        if counts.completed + counts.failed == counts.total:
            async for _, ok, body in results:
                await (output if ok else error).write(body)
                written += 1
            return written
        reason = _NOT_RUN[batch.ending or CANCELLED]
        ready = await anext(results, None)
        async with aclosing(_all_lines(batch, blobs)) as lines:
            async for number, text in lines:
                if ready is not None and ready[0] == number:
                    await (output if ready[1] else error).write(ready[2])
                    ready = await anext(results, None)
                else:
                    await error.write(error_line((await parse(text))["custom_id"], *reason))
                written += 1
    return written


async def _results(batch: StoredBatch, leases: Leases) -> AsyncGenerator[tuple[int, bool, bytes], None]:
    """Yield the line number, success and file line of each result, in the order of the input."""
    after = -1
    while some := await leases.results(batch, after, _RESULTS_AT_ONCE):
        for result in some:
            yield result
        after = some[-1][0]


async def _all_lines(batch: StoredBatch, blobs: Blobs) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the number and the text of each line of the input file."""
    async with aclosing(read_lines(blobs, batch.input_blob, 2**40)) as blocks:
        async for block in blocks:
            for line in block:
                yield line.number, line.text


def _record(batch: StoredBatch, kind: str, writer: BlobWriter, blob: str) -> StoredFile | None:
    """Return the record of a file, or None for an empty file, which OpenAI's API leaves out."""
    if not writer.bytes:
        return None
    return new_file(
        f"{batch.id}_{kind}.jsonl",
        BATCH_OUTPUT,
        blob=blob,
        size=writer.bytes,
        expires_after=batch.output_expires_after,
        key_name=batch.key_name,
    )


def _blob_names(batch: StoredBatch, attempt: int) -> list[str]:
    return [f"{batch.id}-{kind}-{attempt}" for kind in _KINDS]
