"""Lines of a chunk: their places among those that a gateway runs at once, and those that fail as nobody foresaw."""

import asyncio
from types import SimpleNamespace

import numpy as np
import orjson
import structlog
from fastapi import Response

from services.common.config import GatewayConfig
from services.gateway.batch.line_runner import LineRunner
from services.gateway.batch.requests import Requests
from services.gateway.http.guard import Guard
from services.gateway.http.lines import Lines
from services.gateway.store.blobs import Blobs
from services.gateway.store.leases import ChunkLease
from services.gateway.store.tables import StoredBatch
from tests.gateway.batch.requests import COMPLETIONS, line

LINES = 4
PATIENCE_S = 60.0


async def test_lines_that_are_stopped_before_their_first_step_leave_their_places(tmp_path):
    """A batch that is cancelled just then; the endpoints are never asked."""
    blobs = Blobs(str(tmp_path))
    writer = await blobs.create("in")
    await writer.write(b"{}\n" * LINES)
    await writer.close()
    runner = LineRunner(blobs, None, Lines(Guard(GatewayConfig())), LINES)
    batch = StoredBatch(seq=1, id="batch_1", input_blob="in", key_name="", fairness_key="")
    chunk = runner.take(ChunkLease(batch, 0, np.array([(number + 1, 3 * number, 2) for number in range(LINES)])))
    await runner.start(chunk)
    begun = list(chunk.tasks)
    assert (len(begun), runner.free_slots) == (LINES, 0)
    chunk.drop()
    await asyncio.gather(*begun, return_exceptions=True)
    assert runner.free_slots == LINES
    blobs.stop()


async def answer(gateway, posted, caller):
    """An endpoint with defects."""
    prompt = posted.document["prompt"]
    if prompt == "raise":
        raise RuntimeError("secret")
    return Response(b"no JSON" if prompt == "garbage" else b'{"usage": {"completion_tokens": 3}}')


async def test_a_line_that_fails_as_nobody_foresaw_ends_alone_with_an_error_that_the_log_has_more_of(tmp_path):
    """Also one whose file is not any more what was validated."""
    texts = [line(name, prompt=name).encode() for name in ("good", "raise", "garbage")] + [b"{"]
    places = [(number, sum(map(len, texts[: number - 1])), len(text)) for number, text in enumerate(texts, 1)]
    blobs, guard = Blobs(str(tmp_path)), Guard(GatewayConfig())
    writer = await blobs.create("in")
    await writer.write(b"".join(texts))
    await writer.close()
    requests = Requests(SimpleNamespace(guard=guard, fleet=SimpleNamespace(trouble="")), {COMPLETIONS: answer})
    runner = LineRunner(blobs, requests, Lines(guard), LINES)
    batch = StoredBatch(seq=1, id="batch_1", input_blob="in", key_name="", fairness_key="", endpoint=COMPLETIONS)
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        chunk = runner.take(ChunkLease(batch, 0, np.array(places)))
        await runner.start(chunk)
        await asyncio.wait_for(asyncio.gather(*chunk.tasks), PATIENCE_S)
    results = runner.take_results()
    outcomes = {result.outcome.line: result.outcome for result in results}
    told = {number: orjson.loads(result.body) for number, result in outcomes.items()}
    assert {number: (result.ok, told[number]["custom_id"]) for number, result in outcomes.items()} == {
        1: (True, "good"), 2: (False, "raise"), 3: (False, "garbage"), 4: (False, None),
    }  # fmt: skip
    assert outcomes[1].completion_tokens == 3
    for number in (2, 3, 4):
        response = told[number]["response"]
        assert (response["status_code"], response["body"]["error"]["code"]) == (500, "internal")
        assert "secret" not in response["body"]["error"]["message"]
        [logged] = [each for each in logs if each.get("line") == number]
        assert (logged["id"], logged["request_id"]) == ("batch_1", response["request_id"])
        assert response["request_id"]
    assert runner.free_slots == 0  # until the results are in the store
    runner.kept(results)
    assert runner.free_slots == LINES
    blobs.stop()
