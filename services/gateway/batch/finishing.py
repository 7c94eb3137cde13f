"""From results to the output file and the error file, and the end of a batch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.common.errors import Internal
from services.gateway.batch.lines import parse, read_lines
from services.gateway.batch.requests import error_line
from services.gateway.store.batches import Counts
from services.gateway.store.blobs import Blobs, BlobWriter
from services.gateway.store.files import BATCH_OUTPUT, new_file
from services.gateway.store.leases import Leases
from services.gateway.store.tables import CANCELLED, EXPIRED, StoredBatch, StoredFile

_RESULTS_AT_ONCE = 64
_NEVER_RUN = {
    EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}


async def finish(batch: StoredBatch, leases: Leases, blobs: Blobs) -> None:
    """Write what there is, in the order of the input. Raises ``LeaseLost``, or ``Unavailable``."""
    counts = await leases.close_chunks(batch)
    names = [_blob_name(batch, kind, batch.attempt) for kind in ("output", "error")]
    writers = [await blobs.create(name) for name in names]
    try:
        written = await _write(batch, leases, blobs, counts, *writers)
    except BaseException:
        for writer, name in zip(writers, names, strict=True):
            await writer.abandon()
            await blobs.delete(name)
        raise
    for writer in writers:
        await writer.close()
    if written != counts.total:
        raise Internal(f"batch {batch.id} has {counts.total} lines, and {written} were written")
    files = [_record(batch, writer, name) for writer, name in zip(writers, names, strict=True)]
    await leases.finish(batch, counts, *files)
    for file, name in zip(files, names, strict=True):
        if file is None:
            await blobs.delete(name)
    for attempt in range(1, batch.attempt):  # what those who died have left
        for kind in ("output", "error"):
            await blobs.delete(_blob_name(batch, kind, attempt))


async def _write(
    batch: StoredBatch, leases: Leases, blobs: Blobs, counts: Counts, output: BlobWriter, error: BlobWriter
) -> int:
    """Returns how many lines it wrote."""
    written = 0
    results = _results(batch, leases)
    async with aclosing(results):
        if counts.completed + counts.failed == counts.total:
            async for _, ok, body in results:
                await (output if ok else error).write(body)
                written += 1
            return written
        reason = _NEVER_RUN[batch.ending or CANCELLED]
        ready = await anext(results, None)
        lines = _all_lines(batch, blobs)
        async with aclosing(lines):
            async for number, text in lines:
                if ready is not None and ready[0] == number:
                    await (output if ready[1] else error).write(ready[2])
                    ready = await anext(results, None)
                else:
                    await error.write(error_line((await parse(text))["custom_id"], *reason))
                written += 1
    return written


async def _results(batch: StoredBatch, leases: Leases) -> AsyncGenerator[tuple[int, bool, bytes], None]:
    after = -1
    while some := await leases.results(batch, after, _RESULTS_AT_ONCE):
        for result in some:
            yield result
        after = some[-1][0]


async def _all_lines(batch: StoredBatch, blobs: Blobs) -> AsyncGenerator[tuple[int, bytes], None]:
    blocks = read_lines(blobs, batch.input_blob, 2**40)
    async with aclosing(blocks):
        async for block in blocks:
            for line in block:
                yield line.number, line.text


def _record(batch: StoredBatch, writer: BlobWriter, blob: str) -> StoredFile | None:
    """The file; None for an empty one, as OpenAI has it."""
    if not writer.bytes:
        return None
    kind = "output" if "-output-" in blob else "error"
    return new_file(
        f"{batch.id}_{kind}.jsonl",
        BATCH_OUTPUT,
        blob=blob,
        size=writer.bytes,
        expires_after=batch.output_expires_after,
        key_name=batch.key_name,
    )


def _blob_name(batch: StoredBatch, kind: str, attempt: int) -> str:
    return f"{batch.id}-{kind}-{attempt}"
