"""The store by itself: opened by many at once, and leased from by owners of which some come too late."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine

import numpy as np
import pytest
from sqlalchemy import inspect, select, text, update

from services.common.errors import FailedPrecondition, NotFound
from services.gateway.store import files, leases
from services.gateway.store.batches import Batches
from services.gateway.store.chats import ChatFilter, Chats
from services.gateway.store.conversations import Conversations
from services.gateway.store.database import Store
from services.gateway.store.files import Files, new_file
from services.gateway.store.ids import new_id, now
from services.gateway.store.leases import LeaseLost, Leases, LineOutcome
from services.gateway.store.responses import Responses
from services.gateway.store.tables import Chunk, LineResult, SchemaVersion, StoredBatch, StoredFile
from services.gateway.store.tries import Tries


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    yield opened
    await opened.close()


async def test_a_store_of_a_newer_program_is_refused(store, store_url):
    async with store.writing() as session:
        await session.execute(update(SchemaVersion).values(version=999))
    with pytest.raises(FailedPrecondition, match="999"):
        await Store.open(store_url)


def owner(store: Store, name: str) -> Leases:
    return Leases(store, owner=name, pool="m")


def new_batch(input_file_id: str = "f") -> StoredBatch:
    return StoredBatch(
        id=new_id("batch_"), pool="m", endpoint="/v1/completions", input_file_id=input_file_id, input_blob="b",
        labels=None, completion_window="24h", fairness_key="", key_name="", output_expires_after=1,
        status="validating", created_at=now(), expires_at=now() + 3600,
    )  # fmt: skip


async def running_batch(store: Store, chunks: int = 2, size: int = 3) -> StoredBatch:
    """A batch in progress with lines 1 to ``chunks * size``."""
    batch = new_batch()
    async with store.writing() as session:
        session.add(batch)
    first = owner(store, "first")
    claimed = await first.claim_batch()
    lines = np.array([(number, 0, 0) for number in range(1, chunks * size + 1)]).reshape(chunks, size, 3)
    await first.begin_validation(claimed)
    await first.add_chunks(claimed, 0, list(lines))
    await first.end_validation(claimed, total=chunks * size, model=None, errors=None)
    return batch


def outcomes(*lines: int, body: bytes = b"x") -> list[LineOutcome]:
    return [LineOutcome(line, True, body) for line in lines]


async def kept(store: Store) -> dict[int, bytes]:
    async with store.reading() as session:
        return dict(tuple(row) for row in await session.execute(select(LineResult.line, LineResult.body)))


async def pass_leases(store: Store) -> None:
    """As if their time had passed."""
    async with store.writing() as session:
        await session.execute(update(Chunk).where(Chunk.owner.is_not(None)).values(lease_until=time.time() - 1))
        await session.execute(update(StoredBatch).values(lease_until=0.0))


async def test_a_chunk_is_leased_once(store):
    batch = await running_batch(store)
    a, b = owner(store, "a"), owner(store, "b")
    got = await asyncio.gather(*(each.lease_chunk(batch.seq) for each in (a, b, a, b)))
    assert sorted(lease.number for lease in got if lease is not None) == [0, 1]
    assert await a.runnable() == []


async def test_who_takes_over_runs_only_the_lines_that_are_left_and_who_comes_late_changes_nothing(store):
    batch = await running_batch(store, chunks=1)
    dead, heir = owner(store, "dead"), owner(store, "heir")
    lease = await dead.lease_chunk(batch.seq)
    assert await dead.commit({lease.key: outcomes(2)}) == set()
    assert await heir.runnable() == []
    await pass_leases(store)
    assert await heir.runnable() == [batch.seq]
    taken = await heir.lease_chunk(batch.seq)
    assert taken.lines[:, 0].tolist() == [1, 3]
    assert await dead.commit({lease.key: outcomes(1, 3, body=b"late")}) == {lease.key}
    assert await heir.commit({lease.key: outcomes(1, 3)}) == set()
    assert await dead.commit({lease.key: outcomes(1, 3, body=b"late")}) == {lease.key}
    assert await kept(store) == {1: b"x", 2: b"x", 3: b"x"}
    assert (await heir.claim_batch()).ending == "completed"


async def test_what_a_gateway_runs_it_does_not_lease_again_though_its_lease_has_passed(store):
    batch = await running_batch(store)
    mine, other = owner(store, "mine"), owner(store, "other")
    held = {(await mine.lease_chunk(batch.seq)).key for _ in range(2)}
    await pass_leases(store)
    assert await mine.runnable(held=held) == []
    assert await mine.lease_chunk(batch.seq, held) is None
    assert await mine.beat([], held) == ({batch.seq: "in_progress"}, held)
    await pass_leases(store)
    assert (await other.lease_chunk(batch.seq)).number == 0
    left = held - {(batch.seq, 0)}
    assert await mine.beat([], held) == ({batch.seq: "in_progress"}, left)
    assert (await mine.lease_chunk(batch.seq, {(batch.seq, 0)})) is None


async def test_a_line_that_ran_twice_under_one_owner_is_kept_once(store):
    batch = await running_batch(store, chunks=1)
    mine = owner(store, "mine")
    lease = await mine.lease_chunk(batch.seq)
    await mine.commit({lease.key: outcomes(1)})
    twice = [*outcomes(1, 2, 2, 3, body=b"later")]
    assert await mine.commit({lease.key: twice}) == set()
    assert await kept(store) == {1: b"x", 2: b"later", 3: b"later"}
    async with store.reading() as session:
        assert (await session.execute(select(Chunk.completed, Chunk.done))).one() == (3, True)


async def test_a_commit_whose_answer_was_lost_may_be_sent_again(store):
    batch = await running_batch(store, chunks=1)
    mine = owner(store, "mine")
    lease = await mine.lease_chunk(batch.seq)
    await mine.commit({lease.key: outcomes(1)})
    assert await mine.commit({lease.key: outcomes(1, 2)}) == set()
    async with store.reading() as session:
        assert await session.scalar(select(Chunk.completed)) == 2


async def test_of_two_who_finish_one_does(store):
    batch = await running_batch(store, chunks=1)
    a, b = owner(store, "a"), owner(store, "b")
    lease = await a.lease_chunk(batch.seq)
    await a.commit({lease.key: outcomes(1, 2, 3)})
    claimed = await a.claim_batch()
    assert await b.claim_batch() is None
    await pass_leases(store)
    heir = await b.claim_batch()
    assert heir.attempt == claimed.attempt + 1
    counts = await b.close_chunks(heir)
    with pytest.raises(LeaseLost):
        await a.finish(claimed, counts, None, None)
    await b.finish(heir, counts, None, None)
    async with store.reading() as session:
        assert await session.scalar(select(StoredBatch.status)) == "completed"
    while await a.purge():
        pass
    assert await kept(store) == {}


async def test_a_batch_that_another_finished_between_look_and_claim_stays_ended(store, monkeypatch):
    """Both see that it is to be finished; the slower one claims when the other is through with it."""
    batch = await running_batch(store, chunks=1)
    fast, slow = owner(store, "fast"), owner(store, "slow")
    lease = await fast.lease_chunk(batch.seq)
    await fast.commit({lease.key: outcomes(1, 2, 3)})
    look = leases.candidates

    async def look_and_be_overtaken(*what):
        found = await look(*what)
        monkeypatch.setattr(leases, "candidates", look)
        claimed = await fast.claim_batch()
        await fast.finish(claimed, await fast.close_chunks(claimed), None, None)
        return found

    monkeypatch.setattr(leases, "candidates", look_and_be_overtaken)
    assert await slow.claim_batch() is None
    async with store.reading() as session:
        assert await session.scalar(select(StoredBatch.status)) == "completed"


async def test_a_batch_whose_time_is_over_is_finished_as_expired(store):
    batch = await running_batch(store)
    mine = owner(store, "mine")
    lease = await mine.lease_chunk(batch.seq)
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(expires_at=now()))
    assert await mine.runnable() == []
    statuses, _ = await mine.beat([], [lease.key])
    assert statuses == {batch.seq: "in_progress"}
    claimed = await owner(store, "other").claim_batch()
    assert (claimed.status, claimed.ending) == ("finalizing", "expired")
    statuses, chunks = await mine.beat([], [lease.key])
    assert (statuses, chunks) == ({batch.seq: "finalizing"}, {lease.key})


async def test_gateways_of_another_model_leave_a_batch_alone(store):
    batch = await running_batch(store)
    other = Leases(store, owner="other", pool="another")
    assert await other.runnable() == []
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(status="cancelling"))
    assert await other.claim_batch() is None
    assert (await owner(store, "mine").claim_batch()).seq == batch.seq


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"expires_at": 1}, "expired"),
        ({"status": "cancelling", "cancelling_at": 1}, "cancelled"),
        ({"status": "finalizing", "finalizing_at": 1, "ending": "completed"}, "completed"),
        ({"status": "validating", "expires_at": 1}, "expired"),
    ],
)
async def test_a_batch_that_no_gateway_of_its_model_ends_is_ended_by_another(store, changes, ending):
    batch = await running_batch(store)
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(**changes))
    other = Leases(store, owner="other", pool="another")
    claimed = await other.claim_batch()
    assert claimed.seq == batch.seq
    await other.finish(claimed, await other.close_chunks(claimed), None, None)
    async with store.reading() as session:
        assert await session.scalar(select(StoredBatch.status)) == ending


async def test_a_heartbeat_keeps_what_is_held(store):
    batch = await running_batch(store)
    mine = owner(store, "mine")
    for _ in range(2):
        await mine.lease_chunk(batch.seq)
    await pass_leases(store)
    assert await mine.beat([], [(batch.seq, 0), (batch.seq, 7)]) == ({batch.seq: "in_progress"}, {(batch.seq, 0)})
    async with store.reading() as session:
        query = select(Chunk.lease_until).where(Chunk.batch_seq == batch.seq).order_by(Chunk.number)
        held, left = await session.scalars(query)
    assert held > time.time() + leases.LEASE_S / 2
    assert left < time.time()  # what it holds no more, though it never said so, is others' to take


async def test_a_heartbeat_of_who_has_no_chunks_keeps_the_batch_that_it_validates(store):
    await running_batch(store)
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(status="validating"))
    mine = owner(store, "mine")
    batch = await mine.claim_batch()
    await pass_leases(store)
    assert await mine.beat([batch], []) == ({}, set())
    async with store.reading() as session:
        assert await session.scalar(select(StoredBatch.lease_until)) > time.time()


class Paused:
    """A store whose transactions stop before they are committed, until ``go``."""

    def __init__(self, store: Store) -> None:
        self.stopped, self.go = asyncio.Event(), asyncio.Event()
        self._store = store

    @contextlib.asynccontextmanager
    async def writing(self):
        async with self._store.writing() as session:
            yield session
            self.stopped.set()
            await self.go.wait()


async def batch_to_be(store: Store) -> StoredBatch:
    """One that is to read a new file."""
    file = new_file("in.jsonl", "batch", blob="b", size=1, expires_after=None, key_name="")
    async with store.writing() as session:
        session.add(file)
    return new_batch(file.id)


async def in_turn(paused: Paused, first: Coroutine, second: Coroutine) -> list:
    """What comes of both when ``second`` is begun just before the commit of ``first``, which is in ``paused``."""
    begun = asyncio.create_task(first)
    await paused.stopped.wait()
    other = asyncio.create_task(second)
    await asyncio.wait([other], timeout=1)  # it waits for the other transaction, or has gone wrong by now
    paused.go.set()
    return await asyncio.gather(begun, other, return_exceptions=True)


async def test_a_file_that_is_given_to_a_new_batch_is_not_deleted(store):
    paused = Paused(store)
    batch = await batch_to_be(store)
    made, refused = await in_turn(paused, Batches(paused).create(batch), Files(store).delete(batch.input_file_id, ""))
    assert (made.batch.id, made.batch.input_blob) == (batch.id, "b")
    assert isinstance(refused, FailedPrecondition), refused
    assert (await Files(store).get(batch.input_file_id, "")).blob == "b"


async def test_a_file_that_is_being_deleted_is_given_to_no_batch(store):
    paused = Paused(store)
    batch = await batch_to_be(store)
    deleted, refused = await in_turn(
        paused, Files(paused).delete(batch.input_file_id, ""), Batches(store).create(batch)
    )
    assert deleted == "b"
    assert isinstance(refused, NotFound), refused
    assert await Batches(store).page(key_name="", after=None, limit=1) == ([], False)


async def test_a_file_whose_time_is_over_stays_until_the_batch_that_it_was_given_to_has_ended(store, monkeypatch):
    paused = Paused(store)
    batch = await batch_to_be(store)

    async def forget() -> list[str]:
        async with store.reading() as session:
            later = await session.scalar(select(StoredFile.expires_at)) + 1
        monkeypatch.setattr(files, "now", lambda: later)
        return await Files(store).forget_expired()

    made, forgotten = await in_turn(paused, Batches(paused).create(batch), forget())
    assert (made.batch.id, forgotten, await forget()) == (batch.id, [], [])
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(status="completed"))
    assert await forget() == ["b"]


async def indexes(store: Store) -> set[str]:
    def names(session) -> set[str]:
        found = inspect(session.connection())
        return {index["name"] for table in found.get_table_names() for index in found.get_indexes(table)}

    async with store.reading() as session:
        return await session.run_sync(names)


async def test_a_store_of_an_older_program_is_brought_up_to_date_with_all_that_is_in_it(store, store_url):
    batch, complete = await running_batch(store), await indexes(store)
    async with store.writing() as session:
        for index in ("files_key", "files_status", "files_purpose", "batches_key", "batches_turns", "batches_unpurged"):
            await session.execute(text(f"DROP INDEX toka_{index}"))
        for table in ("toka_files", "toka_batches", "toka_responses"):
            await session.execute(text(f"ALTER TABLE {table} DROP COLUMN key_name"))
        for table in ("toka_batches", "toka_chunks"):
            await session.execute(text(f"ALTER TABLE {table} DROP COLUMN reasoning_tokens"))
        await session.execute(text("DROP INDEX ix_toka_responses_lease_until"))
        for column in ("status", "owner", "lease_until"):
            await session.execute(text(f"ALTER TABLE toka_responses DROP COLUMN {column}"))
        for table in ("tries", "response_events", "conversations", "conversation_items", "chats"):
            await session.execute(text(f"DROP TABLE toka_{table}"))
        await session.execute(
            text(
                "INSERT INTO toka_responses (id, body, items, created_at, expires_at) VALUES"
                " ('resp_1', '{}', '[]', 1, 9999999999)"
            )
        )
        await session.execute(update(SchemaVersion).values(version=2))
    newer = await Store.open(store_url)
    try:
        async with newer.reading() as session:
            found = (await session.scalars(select(StoredBatch))).one()
            chunks = (await session.scalars(select(Chunk))).all()
        assert (found.id, found.key_name, found.reasoning_tokens) == (batch.id, "", 0)
        assert [chunk.reasoning_tokens for chunk in chunks] == [0, 0]
        assert await Tries(newer).name("", "k", "f")
        assert (await Responses(newer).get("resp_1")).status == "completed"
        assert (await Conversations(newer).create(None, [{"id": "msg_1"}], "")).items == 1
        assert await Responses(newer, "mine").events("resp_1", 0) == []
        assert (await Chats(newer).page("", ChatFilter(), after=None, limit=1, newest_first=True)) == ([], False)
        assert await indexes(newer) == complete
    finally:
        await newer.close()
