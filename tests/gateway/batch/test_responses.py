"""Stored responses: kept together in few transactions, each alone with its fate, forgotten when their time is over."""

import asyncio
import sqlite3

import pytest
from sqlalchemy import Engine, event

from services.common.errors import NotFound, Overloaded
from services.gateway.store.database import Store
from services.gateway.store.responses import RESPONSES_EXPIRE_S, Responses
from services.gateway.store.tables import SchemaVersion, StoredResponse
from tests.gateway.deployment import Deployment, eventually_async


async def test_responses_that_end_together_are_kept_in_few_transactions(store_url, monkeypatch):
    store = await Store.open(store_url)
    try:
        writes = []
        monkeypatch.setattr(store, "writing", lambda: writes.append(None) or Store.writing(store))
        responses = Responses(store)
        await asyncio.gather(*(responses.keep({"id": f"resp_{n}", "output": []}, b"[]") for n in range(600)))
        assert len(writes) == 3
        assert (await responses.get("resp_599", with_items=True)).items == b"[]"
        await responses.keep({"id": "resp_later", "output": []}, b"[]")
        assert len(writes) == 4
    finally:
        await store.close()


async def test_a_response_is_read_and_cancelled_without_its_items(store_url):
    store, statements = await Store.open(store_url), []

    def note(connection, cursor, statement, *_) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        responses = Responses(store, "me")
        await responses.begin({"id": "resp_1", "status": "queued", "background": True}, b"[1]", "")
        statements.clear()
        assert (await responses.get("resp_1")).status == "queued"
        await responses.cancel("resp_1", "")
        assert [each for each in statements if "body" in each]
        assert not [each for each in statements if "items" in each]
        assert (await responses.get("resp_1", with_items=True)).items == b"[1]"
        await responses.delete("resp_1")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        await store.close()


async def test_a_response_is_forgotten_when_its_time_is_over(store_url, monkeypatch):
    store = await Store.open(store_url)
    try:
        responses = Responses(store)
        await responses.keep({"id": "resp_new", "output": []}, b"[]")
        monkeypatch.setattr("services.gateway.store.responses.RESPONSES_EXPIRE_S", -1)
        await responses.keep({"id": "resp_old", "output": []}, b'[{"id": "msg_1"}]')
        with pytest.raises(Exception, match="resp_old"):
            await responses.get("resp_old")
        assert not await responses.forget_expired()
        async with store.reading() as session:
            left = (await session.scalars(StoredResponse.__table__.select())).all()
        assert len(left) == 1
        assert (await responses.get("resp_new")).body == b'{"id":"resp_new","output":[]}'
        assert RESPONSES_EXPIRE_S == 30 * 24 * 3600
    finally:
        await store.close()


async def test_one_that_cannot_be_kept_fails_no_other(store_url):
    store = await Store.open(store_url)
    try:
        responses = Responses(store)
        names = ["resp_1", "resp_2", "resp_1", "resp_3"]
        told = await asyncio.gather(
            *(responses.keep({"id": one, "output": []}, b"[]") for one in names), return_exceptions=True
        )
        assert [error is None for error in told] == [True, True, False, True]
        for one in names:
            assert (await responses.get(one, with_items=True)).items == b"[]"
    finally:
        await store.close()


@pytest.fixture
async def held(tmp_path):
    """Responses in a store that nobody can write to until the second value is called."""
    store = await Store.open(f"sqlite:///{tmp_path}/batches.db")
    database = sqlite3.connect(tmp_path / "batches.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    yield Responses(store), database.rollback
    database.close()
    await store.close()


async def test_what_nobody_waits_for_is_not_kept_later(held):
    responses, let_go = held
    left = []
    for number in range(3):  # the first is being written when the others come
        left.append(asyncio.create_task(responses.keep({"id": f"resp_{number}", "output": []}, b"[]")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    let_go()
    await responses.keep({"id": "resp_wanted", "output": []}, b"[]")
    for number in range(3):
        with pytest.raises(NotFound):
            await responses.get(f"resp_{number}")
    assert (await responses.get("resp_wanted", with_items=True)).items == b"[]"


async def test_no_more_waits_for_a_store_than_there_is_room_for(held, monkeypatch):
    monkeypatch.setattr("services.gateway.store.responses.MAX_WAITING_BYTES", 3000)
    responses, let_go = held
    kept = [asyncio.create_task(responses.keep({"id": f"resp_{n}", "output": []}, b"x" * 1000)) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="wait for the store"):
        await responses.keep({"id": "resp_more", "output": []}, b"x" * 1000)
    let_go()
    await asyncio.gather(*kept)
    await responses.keep({"id": "resp_more", "output": []}, b"x" * 1000)


async def test_all_whose_time_is_over_are_forgotten_at_once(tmp_path):
    path = tmp_path / "store" / "batches.db"
    await (await Store.open(f"sqlite:///{path}")).close()
    with sqlite3.connect(path) as database:
        rows = [(f"resp_{number}", b"{}", b"[]", 1, 2) for number in range(3500)]
        columns = "(id, body, items, created_at, expires_at)"
        database.executemany(f"INSERT INTO {StoredResponse.__tablename__} {columns} VALUES (?, ?, ?, ?, ?)", rows)
    database.close()
    running = await asyncio.to_thread(Deployment(tmp_path).wait_ready)

    def left() -> int:
        with sqlite3.connect(path) as database:
            [count] = database.execute(f"SELECT count(*) FROM {StoredResponse.__tablename__}").fetchone()
        database.close()
        return count

    try:
        await eventually_async(lambda: left() == 0)
    finally:
        running.stop()


async def test_a_store_of_the_version_before_gets_the_table(tmp_path):
    path = tmp_path / "batches.db"
    store = await Store.open(f"sqlite:///{path}")
    await store.close()
    with sqlite3.connect(path) as database:
        database.execute(f"DROP TABLE {StoredResponse.__tablename__}")
        database.execute(f"UPDATE {SchemaVersion.__tablename__} SET version = 1")
    database.close()
    store = await Store.open(f"sqlite:///{path}")
    try:
        await Responses(store).keep({"id": "resp_1", "output": []}, b"[]")
        assert (await Responses(store).get("resp_1", with_items=True)).items == b"[]"
    finally:
        await store.close()
