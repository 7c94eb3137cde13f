"""The spans of a session's requests, also when its client gives handles twice."""

import pytest

from tests.fakes.collector import collecting
from tests.gateway.deployment import eventually_async
from tests.scheduler.service import PROMPT, session, start
from tokasaurus.scheduler.v1 import generate_pb2

TRACE, SECOND = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("others", [{"handle": 0, "n": 3}, {"handle": 1, "n": 1}])
async def test_a_request_that_takes_a_handle_of_another_leaves_its_trace_alone(others):
    with collecting() as collector:
        async with start(otlp_endpoint=collector.url) as service, session(service) as client:
            service.worker.hold()
            fields = {"tokens": {"token_ids": PROMPT}, "stopping": generate_pb2.Stopping(max_tokens=3)}
            await client.submit(1, **fields, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
            await client.decided(1)
            await client.submit(
                others["handle"], **fields, n=others["n"], traceparent=f"00-{SECOND}-b7ad6b7169203331-01"
            )
            await client.until(lambda message: message.HasField("rejection"))
            service.worker.release()
            await client.finished(1)
            await eventually_async(lambda: len(collector.traces.get(TRACE, ())) >= 4)
        spans = {span.name: span for span in collector.traces[TRACE]}
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    assert not spans["request"].failed
