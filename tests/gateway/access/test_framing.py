"""Heads of requests that HTTP/1.1 has a server refuse."""

import pytest
from starlette.responses import PlainTextResponse

from tests.gateway.access.http_server import Client, serving


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: a\r\nHost: a\r\ncontent-length: 0\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"501"),
    ],
)
async def test_a_head_that_http_does_not_allow_is_refused(head, status):
    async with serving(PlainTextResponse("yes")) as server:
        client = await Client.of(server.port)
        await client.send(head)
        told = await client.rest()
        assert told.startswith(b"HTTP/1.1 %b " % status)
        assert b"connection: close" in told


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_a_head_that_http_allows_is_answered(head):
    async with serving(PlainTextResponse("yes")) as server:
        client = await Client.of(server.port)
        await client.send(head)
        assert (await client.rest()).startswith(b"HTTP/1.1 200 ")
