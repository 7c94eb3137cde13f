"""The spans that a real worker's engine sends of prompts it computes."""

import pytest

from services.common.config import WorkerConfig
from services.common.process.tracing import Tracing
from services.worker.engine.traces import PrefillTraces
from tests.fakes.collector import Span, collecting
from tests.gateway.deployment import eventually_async
from tests.worker.scheduler import admission
from tokasaurus.worker.v1 import plan_pb2

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector():
    with collecting() as made:
        yield made


async def spans_of(collector, count: int) -> list[Span]:
    await eventually_async(lambda: len(collector.traces.get(TRACE, ())) >= count)
    return sorted(collector.traces[TRACE], key=lambda span: span.attributes["toka.slot"])


async def test_the_span_of_a_prefill_ends_with_its_last_step(worker, connect, collector):
    scheduler = await (await connect(await worker(otlp_endpoint=collector.url))).connect()
    prompt, pages = list(range(5, 15)), [0]
    await scheduler.run(
        admissions=[
            admission(0, prompt, pages, traceparent=TRACEPARENT),
            admission(1, [5, 6], [1], traceparent=TRACEPARENT),
            admission(2, [5, 6], [2]),  # not traced
        ],
        batch=plan_pb2.Batch(slots=[1, 2, 0], token_counts=[2, 2, 7]),
    )
    await scheduler.run(batch=plan_pb2.Batch(slots=[1, 2, 0], token_counts=[1, 1, 3]))
    long, short = await spans_of(collector, 2)
    assert {(span.service, span.name, span.parent) for span in (long, short)} == {("toka-worker", "prefill", PARENT)}
    assert [span.attributes["toka.steps"] for span in (long, short)] == [2, 1]
    assert [span.attributes["toka.tokens"] for span in (long, short)] == [10, 2]
    assert long.start <= short.end <= long.end
    assert long.attributes["toka.last_step.forward_ms"] > 0
    assert short.end - short.start > 1e6 * short.attributes["toka.last_step.forward_ms"]  # begins before the step
    assert not long.failed


async def test_the_span_of_an_abandoned_prefill_has_failed(worker, connect, collector):
    scheduler = await (await connect(await worker(otlp_endpoint=collector.url))).connect()
    both = [admission(slot, list(range(5, 15)), [slot], traceparent=TRACEPARENT) for slot in (0, 1)]
    await scheduler.run(admissions=both, batch=plan_pb2.Batch(slots=[0, 1], token_counts=[4, 4]))
    await scheduler.run(release_slots=[0], batch=plan_pb2.Batch(slots=[1], token_counts=[4]))
    scheduler.call.cancel()  # and all slots are free
    assert [span.failed for span in await spans_of(collector, 2)] == [True, True]


def test_the_spans_of_a_step_are_limited(collector):
    """A traced request may have any number of samples, and other sequences wait for the step."""
    tracing = Tracing.of(WorkerConfig(otlp_endpoint=collector.url), "toka-worker")
    traces, slots = PrefillTraces(tracing), range(200)
    admissions = [admission(slot, [5, 6], [slot], traceparent=TRACEPARENT) for slot in slots]
    batch = plan_pb2.Batch(slots=slots, token_counts=[1] * len(slots))
    assert traces.start_plan(plan_pb2.StepPlan(admissions=admissions, batch=batch), 0) == []
    through = traces.start_plan(plan_pb2.StepPlan(admissions=[admission(200, [5], [200], traceparent=TRACEPARENT)]), 0)
    assert len(through) == 64
    tracing.close()
