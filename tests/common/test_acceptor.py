"""Connections while file descriptors are short."""

import asyncio
import contextlib
import resource
import socket

import pytest
from structlog.testing import capture_logs

from services.common.host.descriptors import connections_within, next_number, reserve_of
from services.common.process.acceptor import Acceptor

TIMEOUT_S = 60.0


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)
        self.transport.close()


@contextlib.contextmanager
def limited_to(files):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def port(monkeypatch):
    monkeypatch.setattr(Acceptor, "logged_at", -1e9)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listener, Echo, backlog=16)
        yield listener.getsockname()[1]
        acceptor.close()


@pytest.mark.parametrize("left", [0, 3], ids=["no descriptor", "the reserve only"])
async def test_connections_wait_while_descriptors_are_short_and_are_served_then(port, left):
    unforeseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context))
    with contextlib.ExitStack() as clients, capture_logs() as logs:
        some = [clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        with limited_to(next_number(some[0].fileno()) + left):
            async with asyncio.timeout(TIMEOUT_S):
                while not logs:  # noqa: ASYNC110 (nothing else tells that the acceptor paused)
                    await asyncio.sleep(0.01)
        for client in some:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(client, b"x")
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), TIMEOUT_S) == b"x"
    assert [line["event"] for line in logs] == [
        "file descriptors are short: new connections wait until others are closed"
    ]
    assert not unforeseen


@pytest.mark.parametrize(("limit", "connections"), [(20, 1), (80, 8), (1024, 832), (1_048_576, 65_536)])
def test_connections_leave_a_reserve(limit, connections):
    assert connections_within(limit, 65_536) == connections
    assert connections == 1 or connections + 2 * reserve_of(limit) < limit
