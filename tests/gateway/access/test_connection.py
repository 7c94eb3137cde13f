"""Clients that are slow, or send too much, before and beside their requests: over sockets, by small flags."""

import asyncio
import socket

import pytest

from tests.gateway.access.http_server import HEAD, PATIENCE_S, Client, answer, serving, until

SOON = {"slow_request_seconds": 0.3, "slow_client_seconds": 0.5}


@pytest.mark.parametrize("begun", [b"POST / HT", HEAD, HEAD + b"x-more: ", b"\r\n"])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(begun):
    async with serving(answer, **SOON) as server:
        client = await Client.of(server.port)
        await client.send(begun)
        told = await client.rest()
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in told


async def test_a_head_that_comes_in_drops_is_given_up_all_the_same():
    async with serving(answer, **SOON) as server:
        client = await Client.of(server.port)
        await client.send(HEAD)
        said = await client.pour(b"x", every=0.02)
        assert b" 408 " in said or not said


async def test_who_connects_and_says_nothing_is_sent_away():
    async with serving(answer, **SOON) as server:
        assert await (await Client.of(server.port)).rest() == b""


async def test_a_body_that_stalls_is_given_up_and_its_endpoint_hears_of_it():
    left = asyncio.Event()

    async def endpoint(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(endpoint, **SOON) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 100000\r\n\r\nsome")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")
        await asyncio.wait_for(left.wait(), PATIENCE_S)


async def test_a_body_in_drops_is_given_up():
    async with serving(answer, **SOON) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 100000\r\n\r\n")
        assert b" 200 " not in await client.pour(b"x", every=0.02)


async def test_a_large_body_may_take_longer_if_it_goes_on():
    async with serving(answer, slow_request_seconds=1.0) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 640000\r\n\r\n")
        for _ in range(20):
            await client.send(b"x" * 32_000)
            await asyncio.sleep(0.1)
        assert b" 200 " in await client.head()
        assert await client.body(6) == b"640000"
        client.writer.close()


async def test_an_endpoint_that_is_slow_to_read_is_not_the_clients_fault():
    async def endpoint(scope, receive, send):
        await asyncio.sleep(1.5)
        await answer(scope, receive, send)

    async with serving(endpoint, **SOON) as server:
        client = await Client.of(server.port)
        sending = asyncio.create_task(client.send(HEAD + b"content-length: 9000000\r\n\r\n" + b"x" * 9_000_000))
        assert b" 200 " in await client.head()
        await sending
        client.writer.close()


@pytest.mark.parametrize("more", [b"\r\n", HEAD])
async def test_who_waits_for_an_answer_may_begin_with_the_next_request(more):
    done = asyncio.Event()

    async def endpoint(scope, receive, send):
        await done.wait()
        await answer(scope, receive, send)

    async with serving(endpoint, **SOON, keep_alive_seconds=0.5) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 0\r\n\r\n" + more)
        await asyncio.sleep(1.0)
        done.set()
        assert b" 200 " in await client.head()
        assert await client.body(1) == b"0"
        assert b" 200 " not in await client.rest()  # it never came to its end


async def test_what_follows_an_early_answer_is_thrown_away_for_a_while_only():
    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with serving(refuse, **SOON) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 5\r\n\r\n")
        assert b" 401 " in await client.head()
        await client.send(b"12345" + HEAD + b"content-length: 1000000000\r\n\r\n")  # the connection is as good as new
        assert b" 401 " in await client.head()
        await client.pour(b"x" * 65536, every=0.01)


@pytest.mark.parametrize("name", [b"x" * 20_000, None])
async def test_a_head_has_a_bounded_size(name):
    line = b"x-one: " + b"y" * 20_000 if name is None else name + b": y"
    async with serving(answer, max_header_bytes=16_384) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + line + b"\r\n\r\n")
        told = await client.rest()
        assert told.startswith(b"HTTP/1.1 431 ")
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 0\r\nx-one: " + b"y" * 10_000 + b"\r\n\r\n")
        assert b" 200 " in await client.head()
        client.writer.close()


async def test_a_header_without_end_is_not_kept():
    async with serving(answer, max_header_bytes=16_384) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"x-one: ")
        assert b" 200 " not in await client.pour(b"y" * 4096)


async def test_connections_are_bounded():
    async with serving(answer, max_connections=2) as server:
        clients = [await Client.of(server.port) for _ in range(2)]
        for client in clients:
            await client.send(HEAD + b"content-length: 0\r\n\r\n")
            assert b" 200 " in await client.head()
        refused = await (await Client.of(server.port)).rest()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refused
        for client in clients:
            client.writer.close()


@pytest.mark.parametrize("status", [b"400", b"408", b"431", b"503"])
async def test_who_still_sends_when_refused_reads_why_and_then_the_end(status):
    flags = {"max_connections": 1} if status == b"503" else SOON if status == b"408" else {}
    sent = {b"400": b"nonsense\r\n\r\n", b"431": HEAD + b"x-one: " + b"y" * 100_000 + b"\r\n\r\n"}
    async with serving(answer, **flags) as server:
        other = await Client.of(server.port)
        client = await Client.of(server.port)
        await client.send(sent.get(status, HEAD + b"content-length: 500000\r\n\r\n"))
        assert status in await client.head()
        await asyncio.sleep(0.1)  # until it would have been closed
        for _ in range(5):
            await client.send(b"x" * 100_000)
        while await asyncio.wait_for(client.reader.read(65536), PATIENCE_S):
            pass
        for each in (client, other):
            each.writer.close()
        await until(lambda: not server.server_state.connections)


async def test_who_is_refused_and_stays_is_sent_away():
    async with serving(answer) as server:
        client = await Client.of(server.port)
        await client.send(b"nonsense\r\n\r\n")
        await until(lambda: not server.server_state.connections)
        client.writer.close()


async def test_idle_connections_are_closed():
    async with serving(answer, keep_alive_seconds=0.2) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 0\r\n\r\n")
        assert b" 200 " in await client.head()
        assert await client.rest() == b"0"


async def test_what_is_no_http_is_refused_as_every_error_is():
    async with serving(answer) as server:
        client = await Client.of(server.port)
        await client.send(b"what is this\r\n\r\n")
        told = await client.rest()
        assert told.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"invalid_http"' in told


@pytest.mark.parametrize("size", [100, 65536])
async def test_a_client_that_does_not_read_is_cut_off(size):
    """``size``: of an event. Its stream has no end, so all buffers fill."""
    ended = asyncio.Event()

    async def endpoint(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def stream():
            while True:
                await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
                await asyncio.sleep(0)

        streaming = asyncio.create_task(stream())
        while (await receive())["type"] != "http.disconnect":
            pass
        streaming.cancel()
        ended.set()

    async with serving(endpoint, **SOON) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(HEAD + b"content-length: 0\r\n\r\n")
            await asyncio.wait_for(ended.wait(), PATIENCE_S)


async def test_the_end_of_an_answer_that_nobody_takes_is_not_kept_for_ever():
    async def endpoint(scope, receive, send):
        body = b"x" * 20_000_000
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async with serving(endpoint, **SOON) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(HEAD + b"content-length: 0\r\n\r\n")
            await until(lambda: bool(server.server_state.connections))
            await until(lambda: not server.server_state.connections)


async def test_a_client_that_reads_slowly_is_left_alone():
    async def endpoint(scope, receive, send):
        body = b"x" * 8_000_000
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async with serving(endpoint, slow_client_seconds=1.5) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=65536)
        writer.write(HEAD + b"content-length: 0\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        read = 0
        while read < 8_000_000:
            data = await asyncio.wait_for(reader.read(400_000), PATIENCE_S)
            assert data, "cut off"
            read += len(data)
            await asyncio.sleep(0.05)
        writer.close()


async def test_the_admin_sockets_have_an_application_of_their_own():
    async def admin(scope, receive, send):
        await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with serving(answer, admin=admin) as server:
        for port, status in ((server.port, b" 200 "), (server.admin_port, b" 418 ")):
            client = await Client.of(port)
            await client.send(HEAD + b"content-length: 0\r\n\r\n")
            assert status in await client.head()
            client.writer.close()


async def test_operators_get_in_when_clients_have_all_connections():
    async with serving(answer, max_connections=1) as server:
        clients = [await Client.of(server.port) for _ in range(2)]
        assert b" 503 " in await clients[1].head()
        operator = await Client.of(server.admin_port)
        await operator.send(HEAD + b"content-length: 0\r\n\r\n")
        assert b" 200 " in await operator.head()
        operator.writer.close()
        for client in clients:
            client.writer.close()


async def test_an_admin_port_is_left_to_other_gateways():
    async with serving(answer) as server:
        server.leave_admin_port()
        with pytest.raises(ConnectionRefusedError):
            await Client.of(server.admin_port)
        client = await Client.of(server.port)
        await client.send(HEAD + b"content-length: 0\r\n\r\n")
        assert b" 200 " in await client.head()
        client.writer.close()


@pytest.mark.parametrize("trailer", [b"x-more: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
async def test_trailers_are_bounded_as_heads_are(trailer):
    async with serving(answer, max_header_bytes=20_000) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx-first: ")
        said = await client.pour(trailer)
        assert b" 431 " in said or not said


async def test_chunks_of_one_byte_are_no_trailers():
    async with serving(answer, max_header_bytes=20_000) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
        assert b" 200 " in await client.head()
        assert await client.body(5) == b"20000"
        client.writer.close()


async def test_a_trailer_is_no_header():
    headers = []

    async def endpoint(scope, receive, send):
        await answer(scope, receive, send)
        headers.extend(scope["headers"])

    async with serving(endpoint) as server:
        client = await Client.of(server.port)
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nauthorization: Bearer tk-x\r\n\r\n")
        assert b" 200 " in await client.head()
        client.writer.close()
    assert headers == [(b"host", b"test"), (b"transfer-encoding", b"chunked")]


FRAMED = {
    "length": (b"content-length: 10\r\n", b"0123456789"),
    "chunks": (b"transfer-encoding: chunked\r\n", b"4\r\n0123\r\n6\r\n456789\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize("framing", FRAMED)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_for_another_protocol_keeps_its_body(framing, at_once):
    """As Java's client sends it, which would speak HTTP/2; a body that were taken for the next request could be one
    that its sender's proxy never saw."""
    asked = []

    async def endpoint(scope, receive, send):
        asked.append((scope["method"], scope["path"]))
        await answer(scope, receive, send)

    header, body = FRAMED[framing]
    head = HEAD + header + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEA\r\n\r\n"
    async with serving(endpoint) as server:
        client = await Client.of(server.port)
        for _ in range(2):
            for part in [head + body] if at_once else [head, body[:5], body[5:]]:
                await client.send(part)
                await asyncio.sleep(0.02)
            assert b" 200 " in await client.head()
            assert await client.body(2) == b"10"
        await client.send(b"GET /next HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" * 2)
        for _ in range(2):
            assert b" 200 " in await client.head()
            assert await client.body(1) == b"0"
        client.writer.close()
    assert asked == [("POST", "/")] * 2 + [("GET", "/next")] * 2


async def test_what_cannot_be_read_leaves_nothing_in_the_log(caplog):
    async with serving(answer) as server:
        for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"):
            client = await Client.of(server.port)
            await client.send(sent)
            assert (await client.head()).startswith(b"HTTP/1.1 ")
            client.writer.close()
    assert not caplog.records
