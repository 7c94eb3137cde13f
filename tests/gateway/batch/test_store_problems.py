"""A store that is damaged, locked, full, read-only or gone: what clients see, and what the log has once."""

import contextlib
import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import structlog
from sqlalchemy import text

from services.common.errors import NotFound, StoreUnavailable
from services.gateway.store.blobs import Blobs
from services.gateway.store.database import Store
from services.gateway.store.files import Files, new_file
from services.gateway.store.health import StoreHealth, diagnose
from services.gateway.store.responses import Responses
from tests.gateway.access.conftest import start
from tests.gateway.deployment import Deployment, eventually

PAGE = 4096


@pytest.fixture
def logs():
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def health(counts):
    return StoreHealth(lambda problem: counts.update([problem]))


@pytest.fixture
async def path(tmp_path) -> Path:
    """A database with a response and enough other rows for several pages."""
    found = tmp_path / "store" / "batches.db"
    store = await Store.open(f"sqlite:///{found}")
    for number in range(50):
        await Responses(store).keep({"id": f"resp_{number}", "text": "x" * 1000}, b"[]")
    await store.close()
    return found


def problems(logs) -> list[str]:
    return [each["problem"] for each in logs if each["event"] == "store unavailable"]


def garble(path: Path, offset: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * size)


def swap(path: Path, content: bytes) -> None:
    """Put another file in the place of the database, as an operator does: what SQLite has beside it goes, too."""
    new = path.with_name("new")
    new.write_bytes(content)
    new.replace(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // PAGE * PAGE)


@pytest.mark.parametrize("damage", [lambda path: garble(path, 0, 100), truncate], ids=["header", "truncated"])
async def test_a_database_that_is_damaged_is_named_in_one_sentence_once(path, damage, health, counts, logs):
    damage(path)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match=f"{path} is damaged .* put a copy in its place"):
            await Store.open(f"sqlite:///{path}", health)
    assert (problems(logs), counts) == (["damaged"], {"damaged": 3})


async def test_a_damaged_page_fails_what_is_on_it_and_is_logged_once(path, health, counts, logs):
    with contextlib.closing(sqlite3.connect(path)) as database:
        [(page,)] = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'toka_responses'")
    garble(path, (page - 1) * PAGE, PAGE)
    store = await Store.open(f"sqlite:///{path}", health)
    try:
        for number in range(3):
            with pytest.raises(StoreUnavailable, match=f"{path} is damaged"):
                await Responses(store).get(f"resp_{number}")
            assert await Files(store).page(key_name="", after=None, limit=1, order="asc", purpose=None) == ([], False)
    finally:
        await store.close()
    assert (problems(logs), counts) == (["damaged"], {"damaged": 3})


async def test_a_database_that_another_process_has_locked_says_so_at_the_start_and_later(path, health, logs):
    url = f"sqlite:///{path}?timeout=0.05"
    store = await Store.open(url, health)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StoreUnavailable, match=f"another process has locked the database {path}"):
                await Store.open(url, health)
            with pytest.raises(StoreUnavailable, match=f"another process has locked the database {path}"):
                await Responses(store).keep({"id": "resp_new"}, b"[]")
            assert (await Responses(store).get("resp_1")).status == "completed"  # others may read
            other.execute("ROLLBACK")
        await Responses(store).keep({"id": "resp_new"}, b"[]")
    finally:
        await store.close()
    assert problems(logs) == ["locked"]
    assert [each["problem"] for each in logs if each["event"] == "store available again"] == ["locked"]


@pytest.mark.parametrize(
    ("pragma", "problem", "sentence"),
    [
        ("max_page_count = 1", "full", "the disk of the database .* is full .* free some space"),
        ("query_only = ON", "read_only", "the database .* cannot be written .* let the gateway's user write"),
    ],
)
async def test_a_database_that_cannot_be_written_can_be_read_and_is_logged_once(
    path, pragma, problem, sentence, health, counts, logs
):
    store = await Store.open(f"sqlite:///{path}", health)
    try:
        async with store.reading() as session:  # the store's only connection so far
            await session.execute(text(f"PRAGMA {pragma}"))
        for number in range(3):
            with pytest.raises(StoreUnavailable, match=sentence):
                await Responses(store).keep({"id": f"new_{number}", "text": "x" * PAGE * 8}, b"[]")
            assert (await Responses(store).get("resp_1")).status == "completed"
    finally:
        await store.close()
    assert (problems(logs), counts) == ([problem], {problem: 3})


async def test_a_database_that_is_read_only_at_the_start_says_so(path, health, logs):
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"the database {path} cannot be written"):
            await Store.open(f"sqlite:///file:{path}?mode=ro&uri=true", health)
    assert problems(logs) == ["read_only"]
    assert "file:" not in os.listdir()  # the path of a URI is not a relative one


async def test_a_directory_that_goes_away_is_not_made_again_and_is_used_again_when_it_is_back(path, health, logs):
    store = await Store.open(f"sqlite:///{path}", health)
    away = path.parent.with_name("away")
    try:
        path.parent.rename(away)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=f"the database {path} is gone; put it back"):
                await Responses(store).get("resp_1")
        assert not path.exists()
        away.rename(path.parent)
        assert (await Responses(store).get("resp_1")).status == "completed"
    finally:
        await store.close()
    assert problems(logs) == ["missing"]


async def test_a_database_that_is_replaced_is_opened_again(path, health, logs):
    good = path.read_bytes()
    store = await Store.open(f"sqlite:///{path}", health)
    try:
        await Responses(store).delete("resp_1")
        swap(path, b"\xa5" * PAGE)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="damaged"):
                await Responses(store).get("resp_2")
        swap(path, good)
        assert (await Responses(store).get("resp_1")).status == "completed"
        with pytest.raises(NotFound):
            await Responses(store).get("resp_none")
    finally:
        await store.close()
    assert [each["event"] for each in logs] == ["store unavailable", "store available again"]


def test_errors_that_are_no_problem_of_the_file_are_not_diagnosed():
    with contextlib.closing(sqlite3.connect(":memory:")) as database, pytest.raises(sqlite3.Error) as caught:
        database.execute("SELECT * FROM missing")
    assert diagnose(caught.value, "x") is None
    assert diagnose(ValueError("x"), "x") is None


async def test_files_whose_directory_goes_away_fail_no_batch_and_are_logged_once(tmp_path, health, logs):
    blobs = Blobs(str(tmp_path / "files"), health)
    writer = await blobs.create("a")
    await writer.write(b"text")
    await writer.close()
    (tmp_path / "files").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"files is gone; put it back"):
            await blobs.read_ranges("a", [(0, 4)])
        with pytest.raises(StoreUnavailable, match=r"files is gone; put it back"):
            await blobs.create("b")
    (tmp_path / "away").rename(tmp_path / "files")
    assert await blobs.read_ranges("a", [(0, 4)]) == [b"text"]
    blobs.stop()
    assert problems(logs) == ["missing"]


def test_a_gateway_answers_503_with_the_reason_logs_it_once_counts_it_and_heals(tmp_path):
    running = Deployment(tmp_path).wait_ready()
    path = tmp_path / "store" / "batches.db"
    try:
        with running.sdk() as sdk:
            file = sdk.files.create(file=("a.txt", b"text"), purpose="user_data")
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            good = path.read_bytes()
            swap(path, b"\xa5" * PAGE)
            for _ in range(5):
                assert running.status("/v1/files") == 503
            answer = running.post("/v1/batches", {
                "input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h",
            })  # fmt: skip
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert f"the database {path} is damaged" in answer.json()["error"]["message"]
            assert running.complete(prompt="x", max_tokens=1).status_code == 200
            assert running.metric("toka_store_errors_total") >= 6
            swap(path, good)
            assert sdk.files.content(file.id).text == "text"
        log = tmp_path / "gateway.log"
        eventually(lambda: "store available again" in log.read_text())
        assert log.read_text().count("store unavailable") == 1
        assert "Traceback" not in log.read_text()
    finally:
        running.stop()


@pytest.mark.slow
def test_with_keys_clients_do_not_hear_of_the_path(tmp_path):
    guarded = start(tmp_path)
    try:
        path = tmp_path / "store" / "batches.db"
        with guarded.http("team") as client:
            assert client.get("/v1/files").status_code == 200
            swap(path, b"\xa5" * PAGE)
            answer = client.get("/v1/files")
        assert answer.status_code == 503
        assert "batches.db" not in answer.text
        assert str(tmp_path) not in answer.text
        assert "send the request again later" in answer.json()["error"]["message"]
    finally:
        guarded.running.stop()


async def test_a_new_file_is_there_after_a_write_that_failed(path, health):
    """A failed transaction leaves nothing behind that keeps the next one from working."""
    store = await Store.open(f"sqlite:///{path}?timeout=0.05", health)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable):
                async with store.writing() as session:
                    session.add(new_file("a", "batch", blob="b", size=1, expires_after=None, key_name=""))
        async with store.writing() as session:
            session.add(new_file("a", "batch", blob="b", size=1, expires_after=None, key_name=""))
        found, _ = await Files(store).page(key_name="", after=None, limit=5, order="asc", purpose=None)
        assert [file.filename for file in found] == ["a"]
    finally:
        await store.close()
