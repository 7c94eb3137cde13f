"""The events of ``/v1/messages``, as they are on the wire."""

import asyncio
import json

import httpx
import pytest
from anthropic.types import (
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
)

from services.gateway.anthropic.shape import PING, with_pings
from tests.gateway.deployment import PATIENCE_S, Deployment, eventually
from tests.gateway.messages.conftest import sdk_of
from tests.gateway.messages.test_create import THINKING, WEATHER, saying
from tests.gateway.test_tools import CALL, THOUGHT

KINDS = {
    "message_start": RawMessageStartEvent,
    "content_block_start": RawContentBlockStartEvent,
    "content_block_delta": RawContentBlockDeltaEvent,
    "content_block_stop": RawContentBlockStopEvent,
    "message_delta": RawMessageDeltaEvent,
    "message_stop": RawMessageStopEvent,
}


def raw_events(deployment, text: str, **body) -> list[dict]:
    """Each checked to be named as its data is, and to have the form that the SDK's types say."""
    with httpx.stream(
        "POST", f"{deployment.url}/v1/messages", json=saying(text, stream=True, **body), timeout=PATIENCE_S
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["request-id"] == response.headers["x-request-id"]
        raw = response.read().decode()
    told = []
    for event in raw.removesuffix("\n\n").split("\n\n"):
        head, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {told[-1]['type']}"
        KINDS[told[-1]["type"]].model_validate(told[-1])
    return told


def test_the_events_of_thinking_words_and_a_call(claude):
    text = f"{THOUGHT}Let me see.\n{CALL}"
    events = raw_events(claude, text, thinking=THINKING, tools=[WEATHER])
    start, *middle, delta, stop = events
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] > 0
    assert start["message"]["usage"]["output_tokens"] == 0
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 0
    blocks: list[list[dict]] = []
    for event in middle:
        if event["type"] == "content_block_start":
            blocks.append([])
        assert event["index"] == len(blocks) - 1
        blocks[-1].append(event)
    for block in blocks:
        kinds = [event["type"] for event in block]
        assert kinds == ["content_block_start"] + ["content_block_delta"] * (len(block) - 2) + ["content_block_stop"]
    assert [block[0]["content_block"]["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    thinking, words, call = ([event["delta"] for event in block[1:-1]] for block in blocks)
    assert {each["type"] for each in thinking[:-1]} == {"thinking_delta"}
    assert thinking[-1]["type"] == "signature_delta"
    assert "".join(each["thinking"] for each in thinking[:-1]) == "Is it cold?"
    assert {each["type"] for each in words} == {"text_delta"}
    assert "".join(each["text"] for each in words) == "Let me see."
    assert {each["type"] for each in call} == {"input_json_delta"}
    assert json.loads("".join(each["partial_json"] for each in call)) == {"city": "Köln"}


def test_the_sdk_reads_the_raw_events(client, name):
    kinds = [event.type for event in client.messages.create(model=name, stream=True, **saying("One two"))]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Steps of 5 ms: an answer of 1,900 tokens takes long enough to leave, or to fail, in its middle."""
    flags = {"failover_seconds": 0}
    running = Deployment(tmp_path_factory.mktemp("slow"), worker={"step_ms": 5}, gateway=flags).wait_ready()
    yield running
    running.stop()


def test_the_helper_of_the_sdk_tells_text_as_it_comes(slow):
    with sdk_of(slow) as client:
        model = client.models.list().data[0].id
        with client.messages.stream(model=model, **saying("Hi", max_tokens=100)) as stream:
            pieces = list(stream.text_stream)
            assert stream.get_final_text() == "".join(pieces)
    assert len(pieces) > 1


def test_a_client_that_leaves_cancels_its_request(slow):
    cancelled = slow.metric("toka_sequences_cancelled_total")
    with sdk_of(slow) as client:
        model = client.models.list().data[0].id
        with client.messages.stream(model=model, **saying("Hi", max_tokens=1900)) as stream:
            next(iter(stream.text_stream))
    eventually(lambda: slow.metric("toka_sequences_cancelled_total") == cancelled + 1)
    eventually(lambda: slow.metric("toka_kv_pages_in_use") == 0)


def test_pings_come_while_there_is_nothing_else():
    async def check() -> None:
        quiet = asyncio.Event()

        async def events():
            yield b"first"
            await quiet.wait()
            yield b"second"

        told = []
        async for data in with_pings(events(), seconds=0.01):
            told.append(data)
            if told.count(PING) == 2:
                quiet.set()
        assert told[0] == b"first"
        assert told[-1] == b"second"
        assert set(told[1:-1]) == {PING}

    asyncio.run(check())


def test_a_stream_with_pings_that_is_closed_ends_what_it_reads():
    async def check() -> None:
        ended = asyncio.Event()

        async def events():
            try:
                yield b"first"
                await asyncio.Event().wait()
            finally:
                ended.set()

        stream = with_pings(events(), seconds=0.01)
        assert await anext(stream) == b"first"
        assert await anext(stream) == PING
        await stream.aclose()
        await ended.wait()

    asyncio.run(check())


def test_a_stream_that_breaks_ends_with_an_error(slow):
    body = saying("Hi", max_tokens=1900, stream=True)
    with httpx.stream("POST", f"{slow.url}/v1/messages", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        first = [next(lines) for _ in range(3)]
        slow.scheduler.kill()
        rest = list(lines)
    assert first[0] == "event: message_start"
    assert rest[-3] == "event: error"
    error = json.loads(rest[-2].removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] in ("overloaded_error", "api_error")
    assert error["request_id"] == response.headers["request-id"]
