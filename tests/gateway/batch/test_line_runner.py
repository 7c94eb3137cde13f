"""Places of lines among those that a gateway runs at once."""

import asyncio

import numpy as np

from services.common.config import GatewayConfig
from services.gateway.access.guard import Guard
from services.gateway.access.lines import Lines
from services.gateway.batch.blobs import Blobs
from services.gateway.batch.leases import ChunkLease
from services.gateway.batch.line_runner import LineRunner
from services.gateway.batch.tables import StoredBatch

LINES = 4


async def test_lines_that_are_stopped_before_their_first_step_leave_their_places(tmp_path):
    """A batch that is cancelled just then; the endpoints are never asked."""
    blobs = Blobs(str(tmp_path))
    writer = await blobs.create("in")
    await writer.write(b"{}\n" * LINES)
    await writer.close()
    runner = LineRunner(blobs, None, Lines(Guard(GatewayConfig())), LINES)
    batch = StoredBatch(seq=1, id="batch_1", input_blob="in", key_name="")
    chunk = runner.take(ChunkLease(batch, 0, np.array([(number + 1, 3 * number, 2) for number in range(LINES)])))
    await runner.start(chunk)
    begun = list(chunk.tasks)
    assert (len(begun), runner._slots.locked()) == (LINES, True)
    chunk.drop()
    await asyncio.gather(*begun, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*(runner._slots.acquire() for _ in range(LINES))), 60)
    blobs.stop()
