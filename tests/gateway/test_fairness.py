"""Whoever sends much waits behind itself: the API key says who a request is for."""

import asyncio
import hashlib

import pytest
from starlette.requests import Request

from services.gateway.http.request import read_caller
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import Deployment, eventually_async


def key_of(*headers: tuple[str, str]) -> str:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return read_caller(Request({"type": "http", "path": "/", "headers": raw})).fairness_key


def test_the_fairness_key_is_a_digest_of_the_api_key():
    digest = hashlib.sha256(b"sk-alice").hexdigest()[:16]
    assert key_of(("authorization", "Bearer sk-alice")) == key_of(("authorization", "bearer  sk-alice ")) == digest
    assert key_of(("authorization", "Bearer sk-bob")) != digest


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Basic c2stYWxpY2U=", "sk-alice", ""])
def test_without_an_api_key_there_is_no_fairness_key(header):
    assert key_of(("authorization", header)) == key_of() == ""


def test_any_bytes_in_an_api_key_will_do():
    assert len(key_of(("authorization", "Bearer \xff\xe9"))) == 16


@pytest.mark.slow
async def test_a_second_caller_does_not_wait_for_all_that_the_first_has_sent(tmp_path):
    """The worker stands still until both are in the queue; then it runs one sequence at a time."""
    many, order = 40, []
    worker = FakeWorker(FakeShape(max_slots=1))
    worker.hold()
    deployment = Deployment(tmp_path, worker_address=await worker.start())

    async def complete(client, name: str) -> None:
        await client.completions.create(model="tokasaurus-builtin", prompt=[5] * 1000, max_tokens=20)
        order.append(name)

    async def until_accepted(requests: int) -> None:
        await eventually_async(lambda: deployment.metric("toka_requests_accepted_total") == requests)

    try:
        await asyncio.to_thread(deployment.wait_ready)
        async with deployment.async_sdk() as client, asyncio.TaskGroup() as group:
            first, second = client.with_options(api_key="sk-first"), client.with_options(api_key="sk-second")
            for _ in range(many):
                group.create_task(complete(first, "first"))
            await until_accepted(many)
            group.create_task(complete(second, "second"))
            await until_accepted(many + 1)
            worker.release()
    finally:
        await asyncio.to_thread(deployment.stop)
        await worker.stop()
    assert order.count("first") == many
    assert order.index("second") < many // 2
