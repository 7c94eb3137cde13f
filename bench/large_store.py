"""Measure a large store: ``python -m bench.large_store [rows=100000]``.

Fills an SQLite store with ``rows`` responses, files, batches, conversations and chat completions of one key, opens it
again, and times the transactions of gateways: reads, lists, deletions, claims of batches, and deletions of expired
rows. Figures are the median and the maximum of single transactions in milliseconds. The last line is one JSON object.
The exit status is 1 if a transaction took longer than ``most_ms``.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from pydantic import Field
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert, update

from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.gateway.store import tables
from services.gateway.store.batches import Batches
from services.gateway.store.chats import ChatFilter, Chats
from services.gateway.store.conversations import Conversations
from services.gateway.store.database import Store
from services.gateway.store.files import Files
from services.gateway.store.leases import Leases
from services.gateway.store.responses import Responses
from services.gateway.store.tries import Tries

KEY, OTHER = "key", "other"
_INSERTED_AT_ONCE = 2000
_RARE = 20_000  # one row in this many is of the other key, purpose, model and label
_CHUNKS = 100  # of each batch in progress
_LATER = 2**40


class LargeStoreConfig(Config):
    """The flags."""

    rows: Int = Field(100_000, ge=1, description="rows of each kind")
    body_bytes: Int = Field(2000, ge=1, description="size of the JSON of a response and of a chat completion")
    runs: Int = Field(10, ge=1, description="measurements of each read")
    most_ms: Float = Field(1000.0, gt=0, description="longest allowed time of one transaction")


def rows_of(config: LargeStoreConfig) -> dict[type[tables.Base], Callable[[int], dict[str, Any]]]:
    """Return a function for each table that returns the row of a number."""
    body, at = b"x" * config.body_bytes, int(time.time())

    def owned(number: int) -> dict[str, Any]:
        return {"created_at": at, "key_name": OTHER if number % _RARE == _RARE - 1 else KEY}

    def rare(number: int, usual: str, other: str) -> str:
        return other if number % _RARE == 7 else usual

    def batch(number: int) -> dict[str, Any]:
        active = number % (_RARE // 10) == 0
        return owned(number) | {
            "id": f"batch_{number}", "pool": "m", "endpoint": "/v1/completions", "input_file_id": f"file-{number % 10}",
            "input_blob": "b", "completion_window": "24h", "fairness_key": KEY, "output_expires_after": 1,
            "status": "in_progress" if active else "completed", "expires_at": _LATER, "purged": not active,
        }  # fmt: skip

    return {
        tables.StoredResponse: lambda number: owned(number)
        | {"id": f"resp_{number}", "body": body, "items": b"[]", "expires_at": _LATER, "status": "completed"},
        tables.StoredFile: lambda number: owned(number)
        | {"id": f"file-{number}", "filename": "f", "purpose": rare(number, "user_data", "batch"), "bytes": 1,
           "status": "processed", "blob": f"b{number}", "expires_at": _LATER},
        tables.StoredBatch: batch,
        tables.StoredConversation: lambda number: owned(number)
        | {"id": f"conv_{number}", "expires_at": _LATER, "items": 1, "bytes": 1},
        tables.StoredItem: lambda number: {"conversation_seq": number + 1, "id": "msg_1", "body": b"{}"},
        tables.StoredChat: lambda number: owned(number)
        | {"id": f"chat_{number}", "body": body, "items": b"[]", "model": rare(number, "m", "n"),
           "labels": {"x": rare(number, "1", "2")}, "expires_at": _LATER},
        tables.StoredTry: lambda number: {
            "key_name": KEY, "idempotency_key": f"{number}", "fingerprint": "f", "name": "n", "created_at": at,
        },
        tables.StoredEvents: lambda number: {
            "response_id": f"resp_{number}", "number": 0, "data": b"x" * 100, "created_at": at,
        },
    }  # fmt: skip


async def fill(store: Store, config: LargeStoreConfig) -> None:
    """Insert the rows."""
    for table, row in rows_of(config).items():
        for first in range(0, config.rows, _INSERTED_AT_ONCE):
            some = range(first, min(config.rows, first + _INSERTED_AT_ONCE))
            async with store.writing() as session:
                await session.execute(insert(table), [row(number) for number in some])
    chunks = [
        {"batch_seq": number + 1, "number": chunk, "lines": b"x" * 1536, "count": 64, "done": chunk < _CHUNKS // 2,
         "done_at": float(chunk)}
        for number in range(0, config.rows, _RARE // 10) for chunk in range(_CHUNKS)
    ]  # fmt: skip
    async with store.writing() as session:
        await session.execute(insert(tables.Chunk), chunks)


async def expire(store: Store) -> None:
    """Set the time of expiry of all rows to now."""
    kinds = (tables.StoredResponse, tables.StoredFile, tables.StoredConversation, tables.StoredChat)
    async with store.writing() as session:
        for table in kinds:
            await session.execute(update(table).values(expires_at=1))
        for table in (tables.StoredTry, tables.StoredEvents):
            await session.execute(update(table).values(created_at=1))
        await session.execute(update(tables.StoredBatch).values(status="completed", purged=False))


class Times:
    """Milliseconds of transactions by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    async def once(self, name: str, work: Awaitable[Any]) -> Any:
        """Await ``work``, and record its duration."""
        began = time.perf_counter()
        result = await work
        self.found.setdefault(name, []).append((time.perf_counter() - began) * 1000)
        return result

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the median and the maximum of each name."""
        return {
            name: {"median_ms": round(statistics.median(ms), 2), "most_ms": round(max(ms), 2), "count": len(ms)}
            for name, ms in self.found.items()
        }


async def read(store: Store, config: LargeStoreConfig, times: Times) -> None:
    """Time the accesses of clients and gateways."""
    responses, files, batches, chats = Responses(store), Files(store), Batches(store), Chats(store)
    conversations, leases = Conversations(store), Leases(store, owner="o", pool="m")
    for run in range(config.runs):
        number = (run * 7919 + 1) % min(config.rows, _RARE - 1)
        middle = f"{config.rows // 2}"
        await times.once("get a response", responses.get(f"resp_{number}", KEY))
        await times.once("get a file", files.get(f"file-{number}", KEY))
        await times.once("get a batch", batches.get(f"batch_{number}", KEY))
        await times.once("get an active batch", batches.get("batch_0", KEY))
        await times.once("get a conversation", conversations.get(f"conv_{number}", KEY))
        for order in ("asc", "desc"):
            page = files.page(key_name=KEY, after=f"file-{middle}", limit=100, order=order, purpose=None)
            await times.once("list files", page)
            rare = files.page(key_name=KEY, after=None, limit=100, order=order, purpose="batch")
            await times.once("list files of a rare purpose", rare)
        await times.once("list batches", batches.page(key_name=KEY, after=f"batch_{middle}", limit=100))
        for name, wanted in {
            "list chats": ChatFilter(),
            "list chats of a rare model": ChatFilter(model="n"),
            "list chats of a rare label": ChatFilter(labels={"x": "2"}),
        }.items():
            await times.once(name, chats.page(KEY, wanted, after=None, limit=100, newest_first=True))
        items = conversations.page(f"conv_{number}", KEY, after=None, limit=100, newest_first=True)
        await times.once("list items", items)
        await times.once("look for a phase", leases.claim_batch(lambda _: False))
        await times.once("look for chunks", leases.runnable())
        await times.once("purge nothing", leases.purge())
        await times.once("expire nothing", responses.forget_expired())
        await times.once("fail abandoned responses", responses.fail_abandoned())
        await times.once("delete a response", responses.delete(f"resp_{number}", KEY))
        await times.once("delete a file", files.delete(f"file-{number + 10}", KEY))


async def forget(store: Store, times: Times) -> None:
    """Time each transaction that deletes expired rows."""
    leases, files, tries = Leases(store, owner="o", pool="m"), Files(store), Tries(store)
    while await times.once("purge batches", leases.purge()):
        pass
    for name, kind in {
        "responses": Responses(store),
        "conversations": Conversations(store),
        "chats": Chats(store),
    }.items():
        while await times.once(f"expire {name}", kind.forget_expired()):
            pass
    while await times.once("expire files", files.forget_expired()):
        pass
    while await times.once("expire idempotency keys", tries.forget_expired()):
        pass


async def measure(config: LargeStoreConfig, directory: Path) -> dict[str, Any]:
    """Fill a store and time accesses to it."""
    times, url = Times(), f"sqlite:///{directory}/batches.db"
    store = await Store.open(url)
    await fill(store, config)
    await store.close()
    before = psutil.Process().memory_info().rss
    store = await times.once("open", Store.open(url))
    await read(store, config, times)
    grown = psutil.Process().memory_info().rss - before
    await expire(store)
    await forget(store, times)
    await store.close()
    return {"rows": config.rows, "grown_mb": round(grown / 1e6, 1), "times": times.figures()}


def main() -> None:
    config = from_command_line(LargeStoreConfig)
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(measure(config, Path(directory)))
    table = Table(title=f"a store with {config.rows} rows of each kind")
    for column in ("", "median ms", "most ms", "transactions"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in figures["times"].items():
        table.add_row(name, *(f"{value:g}" for value in found.values()))
    Console().print(table)
    report(figures)
    if any(found["most_ms"] > config.most_ms for found in figures["times"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
