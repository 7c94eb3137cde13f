"""Responses that are generated in the background: polled, followed, cancelled, and left by their gateway."""

import json
import signal
from contextlib import contextmanager

import httpx
import openai
import pytest

from services.gateway.store.responses import ABANDONED
from tests.gateway.deployment import PATIENCE_S, Deployment, Process, eventually, free_port, stop_and_wait
from tests.gateway.test_errors import error_of
from tests.gateway.test_responses import respond

ENDLESS = 1900  # tokens that the slow deployment generates in half a minute


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Two gateways with one store, in front of a worker that takes its time. The second is at ``other_url``."""
    directory, port = tmp_path_factory.mktemp("slow"), free_port()
    running = Deployment(directory, worker={"step_ms": 15})
    other = Process(
        directory / "other.log", "services.gateway", port=port, scheduler_addresses=running.scheduler_address,
        store_dir=directory / "store",
    )  # fmt: skip
    running.wait_ready()
    running.other_url = f"http://127.0.0.1:{port}"
    eventually(lambda: _listens(running.other_url))
    yield running
    other.stop()
    running.stop()


def _listens(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def sdk(slow):
    with slow.sdk() as client:
        yield client


@pytest.fixture
def neighbour(slow):
    with openai.OpenAI(base_url=slow.other_url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def begin(sdk: openai.OpenAI, tokens: int = ENDLESS, **more):
    return sdk.responses.create(
        model="tokasaurus-builtin", input="Hi", max_output_tokens=tokens, background=True, **more
    )


def status(sdk: openai.OpenAI, response_id: str) -> str:
    return sdk.responses.retrieve(response_id).status


def ended(sdk: openai.OpenAI, response_id: str):
    eventually(lambda: status(sdk, response_id) not in ("queued", "in_progress"))
    return sdk.responses.retrieve(response_id)


def running_sequences(slow: Deployment) -> float:
    return slow.metric("vllm:num_requests_running")


def test_a_background_response_is_polled_until_it_is_complete(sdk, neighbour):
    made = begin(sdk, tokens=40, metadata={"a": "b"}, extra_body={"seed": 7})
    assert (made.status in ("queued", "in_progress"), made.background) == (True, True)
    seen = set()
    eventually(lambda: seen.add(status(neighbour, made.id)) or "incomplete" in seen)
    assert seen <= {"queued", "in_progress", "incomplete"}
    told = ended(sdk, made.id)
    assert (told.background, told.store, told.metadata) == (True, True, {"a": "b"})
    foreground = sdk.responses.create(model=made.model, input="Hi", max_output_tokens=40, extra_body={"seed": 7})
    assert told.output_text == foreground.output_text
    assert told.usage.output_tokens == 40
    assert [item.type for item in sdk.responses.input_items.list(made.id)] == ["message"]
    going_on = sdk.responses.create(model=made.model, input="x", max_output_tokens=2, previous_response_id=made.id)
    assert going_on.previous_response_id == made.id


def test_a_background_response_goes_on_without_its_client(slow, sdk):
    body = {"input": "Hi", "max_output_tokens": 60, "background": True, "stream": True}
    with httpx.stream("POST", slow.url + "/v1/responses", json=body, timeout=PATIENCE_S) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data: "))
    made = json.loads(first.removeprefix("data: "))["response"]
    assert ended(sdk, made["id"]).usage.output_tokens == 60


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_background_response_is_cancelled_at_any_gateway(slow, sdk, neighbour, where):
    made = begin(sdk)
    eventually(lambda: status(sdk, made.id) == "in_progress")
    cancelled = (sdk if where == "here" else neighbour).responses.cancel(made.id)
    assert (cancelled.id, cancelled.status) == (made.id, "cancelled")
    assert status(sdk, made.id) == status(neighbour, made.id) == "cancelled"
    eventually(lambda: running_sequences(slow) == 0)
    assert neighbour.responses.cancel(made.id).status == "cancelled"
    assert status(sdk, made.id) == "cancelled"


def test_only_background_responses_are_cancelled_and_those_that_ended_stay_so(sdk):
    made = sdk.responses.create(model="tokasaurus-builtin", input="Hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="background=true") as caught:
        sdk.responses.cancel(made.id)
    assert (caught.value.param, caught.value.code) == ("response_id", "response_not_cancellable")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel("resp_1")
    over = ended(sdk, begin(sdk, tokens=2).id)
    assert sdk.responses.cancel(over.id).to_dict() == over.to_dict()


def test_a_background_response_that_is_deleted_stops(slow, sdk, neighbour):
    made = begin(sdk)
    eventually(lambda: running_sequences(slow) == 1)
    neighbour.responses.delete(made.id)
    eventually(lambda: running_sequences(slow) == 0)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_no_request_goes_on_with_a_response_that_has_not_ended(sdk):
    made = begin(sdk)
    with pytest.raises(openai.BadRequestError, match="wait until it has ended") as caught:
        sdk.responses.create(model=made.model, input="x", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_ended"
    sdk.responses.cancel(made.id)


def test_what_is_wrong_with_a_request_is_said_at_once(slow):
    error = error_of(respond(slow, background=True, store=False), 400)
    assert error["param"] == "background"
    assert error_of(respond(slow, background=True, input="word " * 4000), 400)["param"] == "input"


def test_a_request_that_is_sent_again_begins_no_second_response(slow, sdk):
    again = {"Idempotency-Key": "background-1"}
    first = begin(sdk, tokens=20, extra_headers=again)
    assert begin(sdk, tokens=20, extra_headers=again).id == first.id
    assert ended(sdk, first.id).usage.output_tokens == 20
    assert begin(sdk, tokens=20, extra_headers=again).status == "incomplete"
    events = list(begin(sdk, tokens=20, stream=True, extra_headers={"Idempotency-Key": "background-2"}))
    repeated = list(begin(sdk, tokens=20, stream=True, extra_headers={"Idempotency-Key": "background-2"}))
    assert [event.to_dict() for event in repeated] == [event.to_dict() for event in events]


def followed(sdk: openai.OpenAI, response_id: str, **query) -> list:
    return list(sdk.responses.retrieve(response_id, stream=True, **query))


def test_a_stream_that_was_left_is_followed_from_any_event_at_any_gateway(sdk, neighbour):
    seen = []
    with begin(sdk, tokens=80, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta" and event.sequence_number > 10:
                break
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert seen[0].response.status == "queued"
    name, last = seen[0].response.id, seen[-1].sequence_number
    for client in (sdk, neighbour):
        rest = followed(client, name, starting_after=last)
        assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
        assert rest[-1].type == "response.incomplete"
        assert rest[-1].response.to_dict() == client.responses.retrieve(name).to_dict()
        deltas = [event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta"]
        assert "".join(deltas) == rest[-1].response.output_text
    assert [event.to_dict() for event in followed(neighbour, name)] == [
        event.to_dict() for event in (*seen, *followed(sdk, name, starting_after=last))
    ]


def test_the_stream_of_a_cancelled_response_ends(sdk, neighbour):
    with begin(sdk, stream=True) as stream:
        events = iter(stream)
        made = next(events).response
        while next(events).type != "response.output_text.delta":
            pass
        neighbour.responses.cancel(made.id)
        rest = list(events)
    assert rest[-1].type == "response.cancelled"


@pytest.mark.parametrize(
    ("made", "query", "param"),
    [
        ({"background": True}, {"stream": "true"}, "stream"),
        ({}, {"stream": "true"}, "stream"),
        ({}, {"stream": "maybe"}, "stream"),
        ({}, {"starting_after": "1"}, "starting_after"),
        ({}, {"stream": "true", "starting_after": "x"}, "starting_after"),
    ],
)
def test_only_a_streamed_background_response_is_followed(slow, made, query, param):
    name = respond(slow, max_output_tokens=2, **made).json()["id"]
    answer = httpx.get(f"{slow.url}/v1/responses/{name}", params=query, timeout=PATIENCE_S)
    assert error_of(answer, 400)["param"] == param


def test_without_a_store_there_is_no_background(bare):
    assert "store_url=none" in error_of(respond(bare, background=True), 400)["message"]


@contextmanager
def two_gateways(directory, **gateway):
    """A deployment whose worker takes its time, and a second gateway, at ``other_url``."""
    port = free_port()
    running = Deployment(directory, worker={"step_ms": 15}, gateway=gateway)
    other = Process(
        directory / "other.log", "services.gateway", port=port, scheduler_addresses=running.scheduler_address,
        store_dir=directory / "store",
    )  # fmt: skip
    try:
        running.wait_ready()
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: _listens(url))
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield running, client
    finally:
        other.stop()
        running.stop()


@pytest.mark.slow
def test_the_response_of_a_gateway_that_was_killed_fails(tmp_path):
    with two_gateways(tmp_path) as (running, neighbour), running.sdk() as sdk:
        made, streamed = begin(sdk), begin(sdk, stream=True)
        name = next(iter(streamed)).response.id
        eventually(lambda: status(sdk, made.id) == "in_progress")
        running.gateway.kill()
        failed = ended(neighbour, made.id)
        assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", ABANDONED)
        assert ended(neighbour, name).status == "failed"
        assert followed(neighbour, name)[-1].type == "response.failed"
        streamed.close()


@pytest.mark.slow
def test_a_gateway_that_ends_generates_its_background_responses_first(tmp_path):
    with two_gateways(tmp_path, drain_seconds=60) as (running, neighbour), running.sdk() as sdk:
        made = begin(sdk, tokens=100)
        assert stop_and_wait(running.gateway) == 0
        assert neighbour.responses.retrieve(made.id).usage.output_tokens == 100


@pytest.mark.slow
def test_a_background_response_that_outlasts_its_gateways_drain_fails(tmp_path):
    with two_gateways(tmp_path, drain_seconds=60) as (running, neighbour), running.sdk() as sdk:
        made = begin(sdk)
        eventually(lambda: status(sdk, made.id) == "in_progress")
        running.gateway.signal(signal.SIGTERM)
        eventually(lambda: "draining" in (tmp_path / "gateway.log").read_text())
        assert stop_and_wait(running.gateway) == 0
        failed = neighbour.responses.retrieve(made.id)
        assert failed.status == "failed"
        assert "send the request again" in failed.error.message


@pytest.mark.slow
def test_a_background_response_whose_scheduler_is_lost_fails(tmp_path):
    running = Deployment(tmp_path, worker={"step_ms": 15}, gateway={"failover_seconds": 0}).wait_ready()
    try:
        with running.sdk() as sdk:
            made = begin(sdk)
            eventually(lambda: status(sdk, made.id) == "in_progress")
            running.scheduler.kill()
            failed = ended(sdk, made.id)
            assert (failed.status, failed.error.code) == ("failed", "server_error")
            assert "scheduler was lost" in failed.error.message
    finally:
        running.stop()
