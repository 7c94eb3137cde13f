"""An HTTP connection, which is kept alive as long as the server keeps it."""

import asyncio
from dataclasses import dataclass, field

import httptools

from bench.fuzz.asks import Ask


@dataclass
class Reply:
    """The answer to a request."""

    status: int = 0  # 0: the server closed the connection without an answer
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    broken: str = ""  # reason why the answer is no HTTP

    @property
    def raw(self) -> bytes:
        """The headers and the body, as bytes."""
        return b"%d\r\n" % self.status + b"\r\n".join(b"%s: %s" % pair for pair in self.headers.items()) + self.body


class Connection(asyncio.Protocol):
    """The connection of a client, which makes a new one when this one is closed."""

    def __init__(self) -> None:
        self.closed = False
        self._done: asyncio.Future[None] | None = None
        self._reply = Reply()
        self._wants = self._has = 0
        self._headless = False

    @classmethod
    async def of(cls, host: str, port: int) -> "Connection":
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(cls, host, port))[1]

    async def exchange(self, ask: Ask, timeout_s: float) -> Reply:
        """Send ``ask`` and wait for its answer. Raises ``TimeoutError``."""
        loop = asyncio.get_running_loop()
        self._done, self._reply, self._parser = loop.create_future(), Reply(), httptools.HttpResponseParser(self)
        self._wants, self._has, self._body = ask.leaves_after, 0, bytearray()
        self._headless = ask.method == "HEAD"
        self._transport.write(ask.data)
        if ask.leaves_after == 0:
            self.close()
            return self._reply
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        finally:
            self._reply.body = bytes(self._body)
            if (
                ask.stops
                or ask.leaves_after is not None
                or not self._reply.whole
                or not self._parser.should_keep_alive()
            ):
                self.close()
        return self._reply

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return  # bytes after the end of the answer; the connection is not used again
        self._has += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._settle()
        except httptools.HttpParserError as error:
            self._reply.broken = f"{error}: {data[:200]!r}"
            self._settle()
        if self._wants is not None and self._has >= self._wants:
            self._settle()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._settle()

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        if self._headless:
            self._settle()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # an informational status, such as 100, precedes the answer
            self._reply.whole = True
            self._settle()

    def _settle(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
