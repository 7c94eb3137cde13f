"""The HTTP server with an application of a test's own, and clients that are only a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.config import GatewayConfig
from services.common.process.handover import listen
from services.gateway.http.server import Server

PATIENCE_S = 60.0
HEAD = b"POST / HTTP/1.1\r\nhost: test\r\n"


@asynccontextmanager
async def serving(app, *, admin=None, **flags) -> AsyncIterator[Server]:
    """``app`` on a port of its own: ``server.port``."""
    config = GatewayConfig(port=0, **flags)
    [listener] = listen("127.0.0.1", 0)
    [admin_listener] = listen("127.0.0.1", 0)
    up = asyncio.Event()
    server = Server(config, app, admin or app, [admin_listener], drain_s=5, on_listening=up.set)
    server.port, server.admin_port = listener.getsockname()[1], admin_listener.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await up.wait()
        yield server
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, PATIENCE_S)


async def answer(scope, receive, send) -> None:
    """Reads a request to its end and says how long it was."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def until(condition) -> None:
    """Wait, within bounds, until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (nobody tells when a connection is gone)
            await asyncio.sleep(0.02)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, port: int, **settings) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port, **settings))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """Of the next response."""
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection, or breaks it."""
        received = b""
        try:
            while data := await asyncio.wait_for(self.reader.read(65536), PATIENCE_S):
                received += data
        except ConnectionError:
            pass
        self.writer.close()
        return received

    async def pour(self, data: bytes, *, every: float = 0.0) -> bytes:
        """Send ``data`` over and over until the server ends the connection; returns what it said."""
        said = asyncio.create_task(self.rest())
        try:
            while not said.done():
                await self.send(data)
                await asyncio.sleep(every)
        except ConnectionError:
            pass
        return await said

    async def body(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), PATIENCE_S)
