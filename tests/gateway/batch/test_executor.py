"""What a gateway runs and keeps when its store is slow, or will not have it."""

import asyncio
import contextlib
import sqlite3
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import Response
from sqlalchemy import select
from sqlalchemy.engine import make_url

from services.common.config import GatewayConfig
from services.gateway.batch.executor import Executor
from services.gateway.batch.line_runner import LineRunner
from services.gateway.batch.requests import Requests
from services.gateway.http.guard import Guard
from services.gateway.http.lines import Lines
from services.gateway.store import leases
from services.gateway.store.blobs import Blobs
from services.gateway.store.database import Store
from services.gateway.store.files import Files
from services.gateway.store.leases import Leases
from services.gateway.store.responses import Responses
from services.gateway.store.tables import StoredBatch
from services.gateway.store.tries import Tries
from tests.gateway.batch.requests import COMPLETIONS, line
from tests.gateway.batch.test_store import new_batch, owner
from tests.gateway.deployment import PATIENCE_S

SLOTS = 16


class Gateway:
    """As far as an executor needs one. Its endpoint answers when ``go`` is set."""

    def __init__(self, store: Store, leases: Leases, directory: str) -> None:
        self.go, self.asked, self.answered = asyncio.Event(), Counter(), 0
        self.blobs = Blobs(directory)
        self._store = store
        guard = Guard(GatewayConfig())
        requests = Requests(
            SimpleNamespace(guard=guard, fleet=SimpleNamespace(trouble="")), {COMPLETIONS: self._answer}
        )
        self.runner = LineRunner(self.blobs, requests, Lines(guard), SLOTS)
        self.executor = Executor(
            leases,
            Files(store),
            self.blobs,
            self.runner,
            forget_expired=[Responses(store).forget_expired, Tries(store).forget_expired],
            max_body_bytes=10**6,
        )

    async def _answer(self, gateway, posted, caller) -> Response:
        prompt = posted.document["prompt"]
        self.asked[prompt] += 1
        await self.before_answer(prompt)
        await self.go.wait()
        self.answered += 1
        return Response(b"{}")

    async def before_answer(self, prompt: str) -> None:
        """Called with the prompt of each line; a test may replace it."""

    async def blob(self, name: str, count: int, prefix: str | None = None) -> str:
        """Write a file ``name`` of ``count`` lines whose ids and prompts are the prefix and a number."""
        await self._write(name, _texts(name if prefix is None else prefix, count))
        return name

    async def _write(self, name: str, texts: list[bytes]) -> None:
        writer = await self.blobs.create(name)
        await writer.write(b"".join(texts))
        await writer.close()

    async def batch(self, name: str, chunks: int, size: int, key: str = "") -> StoredBatch:
        """In progress, with ``chunks`` of ``size`` lines that ask for ``name`` and their number."""
        texts = _texts(name, chunks * size)
        await self._write(name, texts)
        batch = new_batch()
        batch.input_blob = name
        batch.fairness_key = key
        async with self._store.writing() as session:
            session.add(batch)
        first = owner(self._store, "first")
        claimed = await first.claim_batch()
        sizes = [len(text) for text in texts]
        places = [(n + 1, sum(sizes[:n]), sizes[n]) for n in range(len(texts))]
        await first.begin_validation(claimed)
        await first.add_chunks(claimed, 0, list(np.array(places).reshape(chunks, size, 3)))
        await first.end_validation(claimed, total=len(texts), model=None, errors=None)
        return claimed

    async def completed(self, batch: StoredBatch) -> int:
        """Its lines, once it is completed."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self._store.reading() as session:
                    found = await session.scalar(select(StoredBatch).where(StoredBatch.seq == batch.seq))
                if found.status == "completed":
                    return found.completed
                await asyncio.sleep(0.01)

    async def all_slots(self) -> None:
        """Wait until no line has a slot."""
        await until(lambda: self.runner.free_slots == SLOTS)


def _texts(prefix: str, count: int) -> list[bytes]:
    return [line(f"{prefix}{n}", prompt=f"{prefix}{n}").encode() + b"\n" for n in range(count)]


@contextlib.asynccontextmanager
async def running(store: Store, leases: Leases, directory):
    gateway = Gateway(store, leases, str(directory))
    try:
        yield gateway
    finally:
        gateway.go.set()
        await gateway.executor.stop()
        gateway.blobs.stop()


async def until(holds) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    yield opened
    await opened.close()


async def test_lines_whose_lease_has_passed_run_once_and_are_kept_once(store, store_url, tmp_path, monkeypatch):
    """No heartbeat is ever in time, and nobody else is there; the store is locked when the lines end."""
    monkeypatch.setattr(leases, "LEASE_S", -1.0)
    async with running(store, owner(store, "mine"), tmp_path / "blobs") as gateway:
        batch = await gateway.batch("a", chunks=4, size=3)
        gateway.executor.start()
        await until(lambda: len(gateway.asked) == 12)
        for _ in range(2):  # it has looked for work again, and found none
            gateway.runner.room.set()
            await until(lambda: not gateway.runner.room.is_set())
        locked = contextlib.ExitStack()
        if make_url(store_url).get_backend_name() == "sqlite":
            database = locked.enter_context(contextlib.closing(sqlite3.connect(make_url(store_url).database)))
            database.execute("BEGIN IMMEDIATE")
        with locked:
            gateway.go.set()
            await until(lambda: gateway.answered == 12)
        assert await gateway.completed(batch) == 12
        assert set(gateway.asked.values()) == {1}
        await gateway.all_slots()


class Particular(Leases):
    """Will not have results of one batch."""

    bad: int | None = None

    async def commit(self, outcomes):
        if any(seq == self.bad for seq, _ in outcomes):
            raise ValueError("not this one")
        return await super().commit(outcomes)


async def test_results_that_cannot_be_kept_take_no_others_along_and_hold_no_places(store, tmp_path):
    mine = Particular(store, owner="mine", pool="m")
    async with running(store, mine, tmp_path / "blobs") as gateway:
        bad, good = await gateway.batch("bad", 1, 4), await gateway.batch("good", 1, 4)
        mine.bad = bad.seq
        gateway.executor.start()
        await until(lambda: len(gateway.asked) == 8)
        gateway.go.set()
        assert await gateway.completed(good) == 4
        await gateway.all_slots()
