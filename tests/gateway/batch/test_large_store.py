"""Queries of a store that holds much: they search by indexes, their number does not grow, and deletions are bounded."""

import contextlib
import sqlite3

import pytest
from sqlalchemy import event, func, insert, select, update
from sqlalchemy.engine import Engine

from services.common.errors import Overloaded
from services.gateway.store import batches as batches_module
from services.gateway.store.batches import Batches
from services.gateway.store.chats import ChatFilter, Chats
from services.gateway.store.conversations import Conversations
from services.gateway.store.database import Store
from services.gateway.store.expiry import AT_ONCE
from services.gateway.store.files import Files, new_file
from services.gateway.store.leases import Leases
from services.gateway.store.responses import Responses
from services.gateway.store.tables import (
    Chunk,
    StoredBatch,
    StoredConversation,
    StoredEvents,
    StoredItem,
    StoredResponse,
    StoredTry,
)
from services.gateway.store.tries import Tries
from tests.gateway.batch.test_store import new_batch


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(f"sqlite:///{tmp_path}/batches.db")
    yield opened
    await opened.close()


@contextlib.contextmanager
def statements():
    """Yields the statements that are executed meanwhile, with their parameters."""
    seen: list[tuple[str, tuple]] = []

    def note(connection, cursor, statement, parameters, context, executemany) -> None:
        seen.append((statement, parameters[0] if executemany else parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def scans(path, seen) -> set[str]:
    """The statements that read a whole table or a whole index, in SQLite's words."""
    found = set()
    with contextlib.closing(sqlite3.connect(path)) as database:
        for statement, parameters in seen:
            if statement.split()[0] in ("SELECT", "UPDATE", "DELETE"):
                plan = database.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
                found |= {f"{row[3]}: {statement}" for row in plan if row[3].startswith("SCAN toka_")}
    return found


async def missing(work) -> None:
    with pytest.raises(Exception, match="there is no"):
        await work


async def test_every_access_searches_by_an_index(store, tmp_path):
    """Also where there is nothing to find: SQLite plans without knowing what is in the tables."""
    responses, files, batches, chats = Responses(store, "me"), Files(store), Batches(store), Chats(store)
    conversations, leases, tries = Conversations(store), Leases(store, owner="o", pool="m"), Tries(store)
    batch = new_batch()
    batch.status = "in_progress"
    file = new_file("f", "batch", blob="b", size=1, expires_after=None, key_name="")
    async with store.writing() as session:
        session.add_all([batch, file, Chunk(batch_seq=1, number=0, lines=b"", count=0)])
    await responses.keep({"id": "resp_1"}, b"[]")
    await chats.keep("chat_1", b"{}", b"[]", "m", None, "")
    conversation = await conversations.create(None, [{"id": "msg_1"}], "")
    with statements() as seen:
        await responses.get("resp_1")
        await responses.bodies(["resp_1"], "", 10)
        await responses.events("resp_1", 0)
        await responses.beat(["resp_1"])
        await responses.fail_abandoned()
        await responses.delete("resp_1")
        for purpose in (None, "batch"):
            for order in ("asc", "desc"):
                await files.page(key_name="", after=file.id, limit=9, order=order, purpose=purpose)
        await batches.get(batch.id, "")
        await batches.page(key_name="", after=None, limit=9)
        await batches.create(new_batch(file.id))
        await missing(batches.cancel("batch_none", ""))
        for wanted in (ChatFilter(), ChatFilter(model="m")):
            await chats.page("", wanted, after="chat_1", limit=9, newest_first=True)
        await chats.delete("chat_1", "")
        await conversations.page(conversation.id, "", after=None, limit=9, newest_first=True)
        await conversations.delete(conversation.id, "")
        await leases.claim_batch()
        await leases.runnable()
        await leases.lease_chunk(batch.seq)
        await leases.beat([batch], [(1, 0)])
        await leases.release()
        await tries.name("", "k", "f")
        for kind in (responses, chats, conversations, files, tries):
            await kind.forget_expired()
        await leases.purge()
        await missing(files.delete("file-none", ""))
    assert len(seen) > 50
    assert scans(tmp_path / "batches.db", seen) == set()


@pytest.mark.parametrize("count", [1, 50])
async def test_the_queries_of_a_list_of_batches_do_not_grow_with_the_list(store, count):
    made = [new_batch() for _ in range(count)]
    for batch in made:
        batch.status = "in_progress"
    async with store.writing() as session:
        session.add_all(made)
    async with store.writing() as session:
        chunks = [{"batch_seq": batch.seq, "number": number, "lines": b"", "count": 2, "done": True, "done_at": 1.0,
                   "completed": number} for batch in made for number in range(3)]  # fmt: skip
        await session.execute(insert(Chunk), chunks)
    with statements() as seen:
        found, _ = await Batches(store).page(key_name="", after=None, limit=100)
    assert len([each for each, _ in seen if each.startswith("SELECT")]) == 3
    assert [shown.counts.completed for shown in found] == [3] * count


async def rows(store: Store, table) -> int:
    async with store.reading() as session:
        return await session.scalar(select(func.count()).select_from(table))


async def fill(store: Store, count: int) -> None:
    """Rows of each kind that have expired."""
    common = {"expires_at": 1, "created_at": 1}
    async with store.writing() as session:
        for table, row in {
            StoredResponse: lambda number: common | {"id": f"r{number}", "body": b"", "items": b""},
            StoredEvents: lambda number: {"response_id": "r", "number": number, "data": b"", "created_at": 1},
            StoredTry: lambda number: {
                "key_name": "", "idempotency_key": f"{number}", "fingerprint": "", "name": "", "created_at": 1,
            },
            StoredItem: lambda number: {"conversation_seq": 1, "id": f"i{number}", "body": b""},
        }.items():  # fmt: skip
            await session.execute(insert(table), [row(number) for number in range(count)])
        await session.execute(insert(StoredConversation), [common | {"seq": 1, "id": "conv_1"}])


async def test_what_has_expired_is_deleted_in_transactions_of_bounded_size(store):
    count = 2 * AT_ONCE + 1
    await fill(store, count)
    kinds = {
        Responses(store): (StoredResponse, StoredEvents),
        Tries(store): (StoredTry,),
        Conversations(store): (StoredItem,),
    }
    for kind, deleted in kinds.items():
        for left in (count - AT_ONCE, count - 2 * AT_ONCE, 0):
            more = await kind.forget_expired()
            assert [await rows(store, table) for table in deleted] == [left] * len(deleted)
            assert more == (left > 0)
    assert await rows(store, StoredConversation) == 0


async def test_ended_batches_without_results_are_purged_together(store):
    async with store.writing() as session:
        session.add_all(new_batch() for _ in range(300))
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(status="completed"))
    leases = Leases(store, owner="o", pool="m")
    assert [await leases.purge(), await leases.purge()] == [True, False]


async def test_a_key_with_very_many_unfinished_batches_is_told_to_wait(store, monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_UNFINISHED", 3)
    file = new_file("f", "batch", blob="b", size=1, expires_after=None, key_name="")
    async with store.writing() as session:
        session.add(file)
    batches = Batches(store)
    for _ in range(3):
        await batches.create(new_batch(file.id))
    with pytest.raises(Overloaded, match="3 batches of this caller have not ended"):
        await batches.create(new_batch(file.id))
    other = new_batch(file.id)
    other.fairness_key = "another"
    await batches.create(other)
