"""Uploads and downloads at once."""

import asyncio
import contextlib
import resource
import socket
from pathlib import Path

import httpx
import pytest

from services.common.config import GatewayConfig
from services.common.errors import Overloaded, Unavailable
from services.gateway.engine.session import Timings
from services.gateway.openai.gateway import Gateway
from services.gateway.store.transfers import Transfers
from tests.gateway.deployment import PATIENCE_S

DOWNLOADS = 200
MOST_GROWTH = 120 * 1024 * 1024  # a MiB or two of each download would be 300


async def test_transfers_of_one_key_leave_room_for_another():
    transfers = Transfers(8, wait_s=0.01)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(transfers.running("a"))
        with pytest.raises(Overloaded, match="2 uploads and downloads of this API key"):
            await stack.enter_async_context(transfers.running("a"))
        await stack.enter_async_context(transfers.running("b"))
    async with transfers.running("a"):
        pass


async def test_a_transfer_beyond_the_limit_waits_for_another_to_end():
    transfers = Transfers(1, wait_s=PATIENCE_S)

    async def second():
        async with transfers.running(""):
            return True

    async with transfers.running(""):
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting


async def test_the_limit_follows_from_the_file_limit_at_the_start_of_the_gateway(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 1024, "raise the limit of open files (ulimit -n)"
    gateway = Gateway.make(GatewayConfig(store_dir=str(tmp_path)), Timings(), None)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # for a while, such as by prlimit
        gateway.store.start(gateway.metrics.count_store_problem)
        opened = await gateway.store.opened()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        for _ in range(20):  # 8 in a gateway that was started with 256
            await stack.enter_async_context(opened.transfers.running(""))
    await gateway.store.close()
    gateway.text.stop()


async def test_a_transfer_is_refused_when_none_ends():
    transfers = Transfers(1, wait_s=0.01)
    async with transfers.running(""):
        with pytest.raises(Unavailable, match="1 uploads and downloads of files run already"):
            async with transfers.running(""):
                pass


@pytest.mark.slow
def test_downloads_that_are_not_read_take_little_memory(deployment):
    content = b"x" * 8_000_000
    with httpx.Client(base_url=deployment.url, timeout=PATIENCE_S) as client:
        file = client.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("f", content)}).json()["id"]
        before = resident_bytes(deployment.gateway.pid)
        with contextlib.ExitStack() as stack:
            for _ in range(DOWNLOADS):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect((client.base_url.host, client.base_url.port))
                connection.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
                assert connection.recv(8) == b"HTTP/1.1"
            assert resident_bytes(deployment.gateway.pid) - before < MOST_GROWTH
        assert client.get(f"/v1/files/{file}/content").content == content
        client.delete(f"/v1/files/{file}")


def resident_bytes(pid):
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) * 1024
