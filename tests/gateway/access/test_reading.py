"""Clients that read their responses slowly, or not at all."""

import asyncio
import contextlib
import socket

import pytest

from services.gateway.http import reading
from tests.gateway.access.http_server import HEAD, PATIENCE_S, Client, serving, until

BODY = b"x" * 20_000_000  # of which the kernel holds 4 MB at most
REQUEST = HEAD + b"content-length: 0\r\n\r\n"
OTHERS = 500


async def large(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(BODY))]})
    await send({"type": "http.response.body", "body": BODY})


def unread(stack: contextlib.ExitStack, port: int) -> socket.socket:
    """A client that has sent its request and takes little of the response into its buffer."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(REQUEST)
    return client


@pytest.mark.parametrize("size", [1, 500])
async def test_a_client_that_takes_a_little_now_and_then_is_cut_off(size):
    async with serving(large, slow_client_seconds=1.0) as server:
        with contextlib.ExitStack() as stack:
            client = unread(stack, server.port)
            client.setblocking(False)
            await until(lambda: bool(server.server_state.connections))
            reading = asyncio.create_task(trickle(client, size))
            await until(lambda: not server.server_state.connections)
            reading.cancel()


async def test_closed_connections_do_not_delay_the_sweep_of_a_slow_reader(monkeypatch):
    async with serving(large, slow_client_seconds=0.2) as server:
        ticks = 0

        async def counted(counter: int, tick=server.on_tick) -> bool:
            nonlocal ticks
            ticks += 1
            return await tick(counter)

        monkeypatch.setattr(server, "on_tick", counted)
        connections = server.server_state.connections
        with contextlib.ExitStack() as stack:
            for _ in range(OTHERS):
                stack.enter_context(socket.socket()).connect(("127.0.0.1", server.port))
            await until(lambda: len(connections) == OTHERS)
            begun = ticks
            await until(lambda: ticks >= begun + 5)  # a round over all of them takes ten ticks
        await until(lambda: not connections)
        with contextlib.ExitStack() as stack:
            unread(stack, server.port)
            await until(lambda: bool(connections))
            begun = ticks
            await until(lambda: not connections)
            assert ticks - begun < 50  # at one closed connection a tick: more than 100


async def trickle(client: socket.socket, size: int) -> None:
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(client, size):  # noqa: ASYNC110 (a slow reader)
            await asyncio.sleep(0.05)


async def test_a_stream_that_has_little_to_send_goes_on():
    async def endpoint(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(15):
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
            await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async with serving(endpoint, slow_client_seconds=0.3) as server:
        client = await Client.of(server.port)
        await client.send(REQUEST)
        await client.head()
        told = await asyncio.wait_for(client.reader.readuntil(b"end"), PATIENCE_S)
        assert told.count(b"data: x") == 15
        client.writer.close()


async def test_the_slowest_clients_are_cut_off_when_too_much_waits_for_all(monkeypatch):
    monkeypatch.setattr(reading, "MAX_UNSENT_BYTES", 3 * len(BODY))
    monkeypatch.setattr(reading, "MAY_BE_BEHIND_S", 0.2)
    async with serving(large) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                unread(stack, server.port)
            await until(lambda: len(server.server_state.connections) == 3)
            early = set(server.server_state.connections)
            for _ in range(3):
                unread(stack, server.port)
            await until(lambda: len(server.server_state.connections) == 6)
            await until(lambda: len(server.server_state.connections) == 3)
            assert not early & server.server_state.connections
