"""One request's spans, of three processes, at an OpenTelemetry collector."""

import grpc
import httpx
import pytest

from tests.fakes.collector import Collector, Span, collecting
from tests.gateway.deployment import BOOT_S, PATIENCE_S, Deployment, eventually
from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

pytestmark = pytest.mark.slow

CALLERS_TRACE, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{CALLERS_TRACE}-{CALLERS_SPAN}-{flags}" for flags in ("01", "00"))
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def collector():
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def deployment(collector, tmp_path_factory):
    """Half of the requests that nobody decided about are traced."""
    traced = {"otlp_endpoint": collector.url}
    made = Deployment(
        tmp_path_factory.mktemp("traced"),
        worker={**traced, "max_tokens_per_step": 64},
        scheduler=traced,
        gateway={**traced, "trace_sample_ratio": 0.5},
    )
    try:
        eventually(lambda: made.status("/ready") == 200, BOOT_S)
        yield made
    finally:
        made.stop()


def complete(collector: Collector, trace: str, spans: int) -> list[Span]:
    """The spans of a trace, once there are so many, by start."""
    eventually(lambda: len(collector.traces.get(trace, ())) >= spans)
    return sorted(collector.traces[trace], key=lambda span: (span.start, span.service))


def ask(deployment: Deployment, traceparent: str = "", **body) -> httpx.Response:
    body = {"model": "tokasaurus-builtin", "prompt": "abc", "max_tokens": 5, "ignore_eos": True} | body
    headers = {"traceparent": traceparent} if traceparent else {}
    answer = httpx.post(deployment.url + PATH, json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_callers_trace_goes_through_all_three_processes(collector, deployment):
    answer = ask(deployment, SAMPLED, prompt="abc " * 100)
    spans = complete(collector, CALLERS_TRACE, 6)
    by_name = {(span.service, span.name): span for span in spans}
    assert len(by_name) == len(spans) == 6
    http, request = by_name["toka-gateway", f"POST {PATH}"], by_name["toka-scheduler", "request"]
    computed = by_name["toka-worker", "prefill"]
    phases = [by_name["toka-scheduler", name] for name in ("queue", "prefill", "decode")]
    assert http.parent == CALLERS_SPAN
    assert request.parent == http.id
    assert [span.parent for span in (*phases, computed)] == [request.id] * 4

    assert http.start <= request.start == phases[0].start <= computed.start
    assert [span.end for span in phases[:2]] == [span.start for span in phases[1:]]
    assert phases[-1].end <= request.end <= http.end
    assert not any(span.failed for span in spans)

    usage = answer.json()["usage"]
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["toka.request_id"] == answer.headers["x-request-id"]
    assert request.attributes["toka.request_id"] == answer.headers["x-request-id"]
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] > 64
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert computed.attributes["toka.tokens"] == usage["prompt_tokens"] - computed.attributes["toka.cached_tokens"]
    assert computed.attributes["toka.steps"] >= 2  # of 64 tokens at most


def test_callers_decide_about_their_traces_and_the_ratio_about_others(collector, deployment):
    before = set(collector.traces)
    for _ in range(24):
        ask(deployment)
    refused, last = (CALLERS_TRACE.replace("0af", mark) for mark in ("fff", "aaa"))
    ask(deployment, UNSAMPLED.replace("0af", "fff"))
    ask(deployment, SAMPLED.replace("0af", "aaa"))  # what there is of the others has come then, too
    complete(collector, last, 6)
    traced = set(collector.traces) - before - {last}
    assert refused not in traced
    assert 0 < len(traced) < 24


def test_samples_have_phases_of_their_own_and_errors_are_marked(collector, deployment):
    trace = CALLERS_TRACE.replace("0af", "bbb")
    ask(deployment, SAMPLED.replace("0af", "bbb"), n=3)
    spans = complete(collector, trace, 2 + 3 * 3 + 3)
    for name in ("queue", "prefill", "decode"):
        samples = [
            span.attributes["toka.sample"] for span in spans if span.service == "toka-scheduler" and span.name == name
        ]
        assert sorted(samples) == [0, 1, 2]

    trace = CALLERS_TRACE.replace("0af", "ccc")
    headers = {"traceparent": SAMPLED.replace("0af", "ccc")}
    wrong = httpx.post(deployment.url + PATH, json={"prompt": "x", "top_p": 7}, headers=headers, timeout=PATIENCE_S)
    assert wrong.status_code == 400
    (span,) = complete(collector, trace, 1)
    assert (span.attributes["http.response.status_code"], span.failed) == (400, False)


def test_direct_grpc_clients_continue_their_traces_too(collector, deployment):
    trace = CALLERS_TRACE.replace("0af", "ddd")
    metadata = (("traceparent", SAMPLED.replace("0af", "ddd")),)
    request = generate_pb2.GenerateRequest(text="abc", stopping=generate_pb2.Stopping(max_tokens=2))
    with grpc.insecure_channel(deployment.scheduler_address) as channel:
        list(scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request, metadata=metadata))
    spans = complete(collector, trace, 5)
    (first,) = (span for span in spans if span.name == "request")
    assert (first.service, first.parent) == ("toka-scheduler", CALLERS_SPAN)
    assert {span.service for span in spans} == {"toka-scheduler", "toka-worker"}
