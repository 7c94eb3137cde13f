"""When a batch is said to be done."""

import pytest
from sqlalchemy import update

from services.gateway.store import batches
from services.gateway.store.batches import Batches
from services.gateway.store.database import Store
from services.gateway.store.forecast import BatchForecast, forecast
from services.gateway.store.tables import Chunk, StoredBatch

BEGUN = 1000


def test_chunks_tell_by_the_time_since_the_oldest():
    told = forecast(128, [(64, 1020.0), (64, 1010.0)], 1042, lines_done=130, began_at=BEGUN)
    assert told == BatchForecast(1042 + 64, 2.0)


@pytest.mark.parametrize("recent", [[], [(64, 1009.0)]])
def test_before_that_all_lines_so_far_tell(recent):
    assert forecast(40, recent, 1010, lines_done=80, began_at=BEGUN) == BatchForecast(1015, 8.0)


def test_while_nothing_ends_the_forecast_moves_away():
    told = [forecast(10, [], now, lines_done=10, began_at=BEGUN).finish_at - now for now in (1010, 1020)]
    assert told == [10, 20]


@pytest.mark.parametrize(("lines", "now"), [(7, 1100), (100, 1001)])
def test_too_little_tells_nothing(lines, now):
    assert forecast(10, [], now, lines_done=lines, began_at=BEGUN) is None


async def test_a_batch_smaller_than_two_chunks_has_one(store_url, monkeypatch):
    store = await Store.open(store_url)
    try:
        async with store.writing() as session:
            session.add(
                StoredBatch(
                    id="b",
                    pool="m",
                    endpoint="/v1/completions",
                    input_file_id="f",
                    input_blob="b",
                    labels=None,
                    completion_window="24h",
                    fairness_key="",
                    key_name="",
                    output_expires_after=1,
                    total=100,
                    status="in_progress",
                    created_at=BEGUN,
                    in_progress_at=BEGUN,
                    expires_at=BEGUN + 3600,
                )
            )
            await session.flush()
            session.add(Chunk(batch_seq=1, number=0, lines=b"", count=64, completed=19, failed=1))
        monkeypatch.setattr(batches, "now", lambda: BEGUN + 10)
        assert (await Batches(store).get("b", "")).forecast == BatchForecast(BEGUN + 10 + 40, 2.0)
        async with store.writing() as session:
            await session.execute(update(Chunk).values(completed=6))
        assert (await Batches(store).get("b", "")).forecast is None
    finally:
        await store.close()
