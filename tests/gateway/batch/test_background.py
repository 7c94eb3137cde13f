"""Leases of background responses, and what a gateway holds of those that it generates."""

import asyncio
import contextlib

import pytest
from sqlalchemy import update

from services.common.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded, Unavailable
from services.gateway.store import background as module
from services.gateway.store.background import Background, Running
from services.gateway.store.conversations import Addition, Conversations
from services.gateway.store.database import Store
from services.gateway.store.responses import ABANDONED, Responses
from services.gateway.store.tables import StoredResponse


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    yield opened
    await opened.close()


def response(name: str = "resp_1", status: str = "queued") -> dict:
    return {"id": name, "status": status, "background": True, "output": []}


def event(number: int) -> bytes:
    return b'event: x\ndata: {"sequence_number":%d}\n\n' % number


async def pass_leases(store: Store) -> None:
    """As if their time had passed."""
    async with store.writing() as session:
        await session.execute(update(StoredResponse).values(lease_until=1.0))


async def test_a_response_whose_lease_has_passed_fails_once_and_its_gateway_comes_too_late(store):
    slow, other = Responses(store, "slow"), Responses(store, "other")
    await slow.begin(response(), b"[]", "team")
    assert await slow.progress(response(status="in_progress"))
    assert not await other.progress(response(status="in_progress"))
    assert await slow.beat(["resp_1"]) == {"resp_1"}
    assert await other.fail_abandoned() is False
    assert (await other.get("resp_1", "team")).status == "in_progress"
    await pass_leases(store)
    await other.fail_abandoned()
    kept = await other.get("resp_1", "team", with_items=True)
    assert kept.status == "failed"
    assert ABANDONED.encode() in kept.body
    assert await slow.beat(["resp_1"]) == set()
    assert not await slow.end(response(status="completed"), "team", None)
    left = await other.get("resp_1", "team", with_items=True)
    assert (left.status, left.body, left.items) == (kept.status, kept.body, kept.items)


async def test_of_one_key_another_reads_and_cancels_nothing(store):
    mine = Responses(store, "mine")
    await mine.begin(response(), b"[]", "team", event(0))
    for ask in (mine.get, mine.cancel, mine.delete):
        with pytest.raises(NotFound):
            await ask("resp_1", "other")
    with pytest.raises(AlreadyExists):
        await mine.begin(response(), b"[]", "team")
    assert b'"cancelled"' in await mine.cancel("resp_1", "team")
    assert not await mine.end(response(status="completed"), "team", None)
    await mine.delete("resp_1", "team")
    assert await mine.events("resp_1", 0) == []


async def test_only_background_responses_are_cancelled(store):
    records = Responses(store)
    await records.keep({"id": "resp_1", "output": [], "status": "completed"}, b"[]")
    with pytest.raises(InvalidRequest, match="background=true"):
        await records.cancel("resp_1", "")


async def test_the_end_of_a_response_and_its_conversation_are_one(store):
    records, conversations = Responses(store, "mine"), Conversations(store)
    conversation = await conversations.create(None, [], "team")
    addition = Addition(conversation.id, [{"id": "msg_1"}])
    await records.begin(response(), b"[]", "team")
    assert await records.end(response(status="completed"), "team", addition)
    assert len(await conversations.items(conversation.id, "team")) == 1
    await records.begin(response("resp_2"), b"[]", "team")
    with pytest.raises(NotFound):
        await records.end(response("resp_2", "completed"), "team", Addition("conv_gone", []))
    assert (await records.get("resp_2", "team")).status == "queued"


async def test_events_are_read_from_any_number(store):
    records = Responses(store, "mine")
    await records.begin(response(), b"[]", "", event(0) + event(1))
    await records.add_events([("resp_1", 2, event(2)), ("resp_2", 0, event(0))])
    await records.add_events([("resp_1", 2, event(2) + event(3))])  # the answer to the first call was lost
    assert await records.events("resp_1", 0) == [(0, event(0) + event(1)), (2, event(2) + event(3))]
    assert [number for number, _ in await records.events("resp_1", 3)] == [2]
    assert [number for number, _ in await records.events("resp_1", 99)] == [2]


class Generation:
    """Events of a response that go on as long as nobody says ``over``."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.closed = 0

    async def events(self):
        yield event(0)
        yield event(1)
        await self.over.wait()

    def close(self) -> None:
        self.closed += 1


@contextlib.asynccontextmanager
async def generating(store: Store, records: Responses | None = None):
    background = Background(records or Responses(store, "mine"))
    background.start()
    try:
        yield background
    finally:
        await background.stop()


async def begin(background: Background, name: str = "resp_1", key: str = "", events=None) -> tuple[Running, Generation]:
    generation, one = Generation(), Running(response(name), key, streamed=True)
    await background.begin(one, b"[]", (events or generation.events)(), generation.close)
    return one, generation


async def test_a_gateway_generates_so_many_for_a_key_and_so_many_in_all(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_RUNNING_OF_KEY", 1)
    monkeypatch.setattr(module, "MAX_RUNNING", 2)
    async with generating(store) as background:
        one, first = await begin(background, "resp_1", "a")
        with pytest.raises(Overloaded, match="of at most 1 and 2"):
            background.check_room("a")
        background.check_room("b")
        await begin(background, "resp_2", "b")
        with pytest.raises(Overloaded, match="2 in all"):
            background.check_room("c")
        first.over.set()
        await one.task
        background.check_room("a")
        monkeypatch.setattr(module, "MAX_EVENT_BYTES", 1)
        with pytest.raises(Overloaded, match="bytes of events"):
            background.check_room("a")


async def test_one_that_cannot_be_begun_is_given_back(store):
    async with generating(store) as background:
        await begin(background)
        with pytest.raises(AlreadyExists):
            await begin(background)
        generation, one, given_back = Generation(), Running(response(), "", streamed=False), []
        one.resources.callback(given_back.append, True)
        with pytest.raises(AlreadyExists):
            await background.begin(one, b"[]", generation.events(), generation.close)
        assert (generation.closed, given_back) == (1, [True])


async def test_a_gateway_that_stops_marks_what_it_generates_as_failed(store):
    async with generating(store) as background:
        one, generation = await begin(background)
    kept = await Responses(store).get("resp_1")
    assert (kept.status, generation.closed, one.ended) == ("failed", 1, True)
    assert ABANDONED.encode() in kept.body


async def test_a_defect_fails_one_response(store):
    async def broken():
        yield event(0)
        raise RuntimeError("a defect")

    async with generating(store) as background:
        _, generation = await begin(background, events=broken)
        told = [data async for data in background.follow("resp_1", "", 0)]
        assert told[0] == event(0)
        assert b"response.failed" in told[-1]
        assert b"internal error" in told[-1]
        assert generation.closed == 1


async def test_one_that_another_gateway_cancelled_is_stopped_by_the_next_heartbeat(store, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.0)
    async with generating(store) as background:
        one, generation = await begin(background)
        await Responses(store, "other").cancel("resp_1", "")
        told = b"".join([data async for data in background.follow("resp_1", "", 1)])
        assert told.startswith(event(1))
        assert b"response.cancelled" in told
        assert (one.ended, generation.closed) == (True, 1)


async def test_what_has_ended_waits_for_a_store_that_does_not_answer(store, monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)

    class Hesitant(Responses):
        failures = 2

        async def end(self, *arguments):
            if self.failures:
                self.failures -= 1
                raise Unavailable("the store does not answer")
            return await super().end(*arguments)

    records = Hesitant(store, "mine")
    async with generating(store, records) as background:
        one, generation = await begin(background)
        body = response(status="completed") | {"conversation": {"id": "conv_gone"}}
        await background.end(one, body, Addition("conv_gone", []))
        generation.over.set()
        kept = await records.get("resp_1")
        assert (kept.status, records.failures) == ("completed", 0)
        assert b'"conversation":null' in kept.body
