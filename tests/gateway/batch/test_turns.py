"""Turns of keys at batch work: slots, leases of chunks, validation, and the bound of active jobs."""

import asyncio
import contextlib

import pytest
from sqlalchemy import event, func, select, update
from sqlalchemy.engine import Engine

from services.gateway.batch.slots import LineSlots
from services.gateway.store.database import Store
from services.gateway.store.leases import Leases
from services.gateway.store.round_robin import RoundRobin
from services.gateway.store.tables import StoredBatch
from services.gateway.store.work import MAX_ACTIVE_OF_KEY
from tests.gateway.batch.test_executor import SLOTS, running, until
from tests.gateway.batch.test_store import new_batch, owner, running_batch
from tests.gateway.deployment import PATIENCE_S


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    yield opened
    await opened.close()


def of_key(key: str, **columns) -> StoredBatch:
    batch = new_batch()
    batch.key_name = batch.fairness_key = key
    for name, value in columns.items():
        setattr(batch, name, value)
    return batch


async def add(store: Store, *batches: StoredBatch) -> None:
    async with store.writing() as session:
        session.add_all(batches)


# Slots.


async def test_a_free_slot_goes_to_the_key_that_runs_the_fewest_lines():
    slots, served = LineSlots(4), []

    async def run(key: str) -> None:
        await slots.take(key)
        served.append(key)

    tasks = [asyncio.create_task(run(key)) for key in "aaaaaaaa" + "bbb" + "c"]
    await asyncio.sleep(0)
    for _ in range(6):
        slots.give_back("a")
        await asyncio.sleep(0)
    assert "".join(served) == "aaaa" + "bcabaa"
    assert slots.free == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_reserved_slots_are_for_keys_that_run_few_lines():
    slots = LineSlots(16, reserved=4)
    for _ in range(12):
        await asyncio.wait_for(slots.take("a"), PATIENCE_S)
    waiting = asyncio.create_task(slots.take("a"))
    await asyncio.wait_for(slots.take("b"), PATIENCE_S)
    assert (slots.free, waiting.done()) == (3, False)
    slots.give_back("a")
    await asyncio.sleep(0)
    assert not waiting.done()  # the slot fills the reserve up
    slots.give_back("b")
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert slots.free == 4


async def test_a_line_that_is_cancelled_while_it_waits_leaves_no_slot_behind():
    slots = LineSlots(1)
    await slots.take("a")
    first, second = (asyncio.create_task(slots.take("b")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    slots.give_back("a")
    second.cancel()  # it has the slot, and has not run since
    await asyncio.gather(first, second, return_exceptions=True)
    assert slots.free == 1


# Turns.


def test_keys_take_turns_and_so_do_the_batches_of_a_key():
    turns, found, served = RoundRobin(), {1: "a", 2: "a", 3: "a", 4: "b"}, []
    for _ in range(8):
        seq = turns.order((key, seq) for seq, key in found.items())[0]
        turns.served(found[seq], seq)
        served.append(seq)
    assert served == [1, 4, 2, 4, 3, 4, 1, 4]


def test_a_key_that_returns_at_once_with_new_work_does_not_go_first():
    turns = RoundRobin()
    turns.served("a", 1)
    turns.served("b", 2)
    turns.served("a", 3)
    assert turns.order([("a", 4), ("b", 2)]) == [2, 4]


# Execution.


async def answer_at_once(prompt: str) -> None:
    """Let a line go on."""


async def test_lines_of_a_later_key_run_between_those_of_a_key_with_many_batches(store, tmp_path):
    """Key a has four batches, and lines in every slot and behind them. Of the next lines, every second is key b's."""
    order: list[str] = []
    async with running(store, owner(store, "mine"), tmp_path / "blobs") as gateway:
        permits = asyncio.Semaphore(0)

        async def wait_for_permit(prompt: str) -> None:
            order.append(prompt[0])
            await permits.acquire()

        gateway.before_answer = wait_for_permit
        for number in range(4):
            await gateway.batch(f"a{number}", chunks=4, size=64, key="a")
        gateway.go.set()
        gateway.executor.start()
        await until(lambda: len(order) == SLOTS)
        b = of_key("b", input_blob=await gateway.blob("b", 8))
        await add(store, b)
        gateway.executor.look()
        await until(lambda: gateway.runner.waiting("b") == 8)
        for _ in range(SLOTS):
            permits.release()
        await until(lambda: len(order) == 2 * SLOTS)
        assert order[SLOTS:].count("b") == 8
        gateway.before_answer = answer_at_once
        for _ in range(SLOTS):
            permits.release()
        assert await gateway.completed(b) == 8


async def test_gateways_on_one_store_both_serve_a_later_key_next(store):
    for _ in range(3):
        await running_batch(store, chunks=4)
    async with store.writing() as session:
        await session.execute(update(StoredBatch).values(fairness_key="a"))
    both = [owner(store, name) for name in ("one", "two")]
    for each in both:
        for _ in range(2):
            await each.lease_chunk((await each.runnable())[0])
    later = [(await running_batch(store, chunks=1)).seq for _ in range(2)]
    async with store.writing() as session:
        await session.execute(update(StoredBatch).where(StoredBatch.seq.in_(later)).values(fairness_key="b"))
    served = [(await each.runnable())[0] for each in both]
    assert served == [later[0], later[0]]


# Validation.


class Noting(Leases):
    """Notes whose batches have been validated."""

    validated: list[str]

    async def end_validation(self, batch, **result):
        await super().end_validation(batch, **result)
        self.validated.append(batch.fairness_key)


async def test_a_small_file_is_validated_while_a_large_one_is(store, tmp_path):
    mine = Noting(store, owner="mine", pool="m")
    mine.validated = []
    async with running(store, mine, tmp_path / "blobs") as gateway:
        gateway.go.set()
        large = [of_key("a", input_blob=await gateway.blob("large", 64 * 300)) for _ in range(2)]
        small = of_key("b", input_blob=await gateway.blob("small", 8))
        await add(store, *large, small)
        gateway.executor.start()
        await until(lambda: mine.validated)
        assert mine.validated == ["b"]
        assert await gateway.completed(small) == 8


async def test_of_one_key_one_batch_is_validated_at_a_time(store):
    await add(store, *(of_key("a") for _ in range(5)), of_key("b"), of_key("c"))
    mine, claimed = owner(store, "mine"), []

    def is_wanted(candidate) -> bool:
        return candidate.key not in [batch.fairness_key for batch in claimed]

    while (batch := await mine.claim_batch(is_wanted)) is not None:
        claimed.append(batch)
    assert [batch.fairness_key for batch in claimed] == ["a", "b", "c"]


async def test_further_jobs_of_a_key_wait_in_validating_until_one_ends(store):
    await add(store, *(of_key("a", status="in_progress", lease_until=0.0) for _ in range(MAX_ACTIVE_OF_KEY)))
    async with store.writing() as session:  # their lines run
        first = await session.scalar(select(StoredBatch).limit(1))
        await session.execute(update(StoredBatch).values(lease_until=2.0**40))
    await add(store, of_key("a"), of_key("b"))
    mine = owner(store, "mine")
    assert (await mine.claim_batch()).fairness_key == "b"
    assert await mine.claim_batch() is None
    async with store.writing() as session:
        await session.execute(update(StoredBatch).where(StoredBatch.seq == first.seq).values(status="completed"))
    assert (await mine.claim_batch()).fairness_key == "a"


# Looks at the store.


@contextlib.contextmanager
def statements():
    """Yields the statements that are executed meanwhile."""
    seen: list[str] = []

    def note(connection, cursor, statement, *_) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.parametrize("jobs", [1, 500])
async def test_a_look_at_the_store_is_one_query_however_many_jobs_there_are(store, jobs):
    await add(store, *(of_key("a", status="in_progress", lease_until=2.0**40) for _ in range(min(jobs, 60))))
    await add(store, *(of_key("a") for _ in range(jobs)))
    mine = Leases(store, owner="mine", pool="m")
    with statements() as seen:
        assert await mine.claim_batch(lambda _: False) is None
        assert await mine.runnable() == []
    assert len([each for each in seen if each.startswith("SELECT")]) == 2
    async with store.reading() as session:
        assert await session.scalar(select(func.count()).select_from(StoredBatch)) >= jobs
