"""Sends a request on its own connection and measures the reply, at a low cost so that the client is not the limit.

It is HTTP/1.1 on asyncio connections with httptools' parser. The text of a reply is not kept, only its times and its
token counts. Everything runs on the event loop of a client process.
"""

import asyncio
import json
import re
import ssl
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_CHAT_TEXT = re.compile(rb'content":\s*"[^"]')  # also reasoning_content. The content of the first chunk is empty
_TAIL = 4096  # bytes of a stream that are kept, for the usage in its last event
_SHOWN = 500  # bytes of a reply that are part of its error


@dataclass(frozen=True)
class Reply:
    """The result of one request. Times are those of ``time.perf_counter``, which all processes of a host share."""

    sent_at: float  # after the connection was made
    first_at: float  # arrival of the first text
    last_at: float  # arrival of the last text
    ended_at: float
    prompt_tokens: int  # in usage
    completion_tokens: int  # in usage
    error: str = ""  # reason of the failure, or empty
    kind: str = ""  # short name of the error
    gaps: Sequence[float] = ()  # seconds between arrivals of text

    @property
    def per_token_ms(self) -> float:
        """Milliseconds per token of a stream. Tokens are counted by usage, since a chunk may have several."""
        return 1000 * (self.last_at - self.first_at) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True)
class Endpoint:
    """The address of requests, and the options of the connection."""

    url: str  # with its path
    api_key: str = "none"
    ca: str | None = None  # file with the certificate authority of the server. None: the authorities of the system
    timeout_s: float | None = None  # of a request, its connection included

    def encode(self, body: dict[str, Any]) -> bytes:
        """Return the bytes of a whole request."""
        address, content = urlsplit(self.url), json.dumps(body).encode()
        head = (
            f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {self.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + content


class RequestSender:
    """Sends requests to one endpoint, and counts the arrivals of text."""

    def __init__(self, endpoint: Endpoint) -> None:
        address = urlsplit(endpoint.url)
        secure = address.scheme == "https"
        self.running = 0  # requests without a whole reply
        self.arrivals = 0  # arrivals of text so far
        self._endpoint = endpoint
        self._host, self._port = address.hostname or "", address.port or (443 if secure else 80)
        self._tls = ssl.create_default_context(cafile=endpoint.ca) if secure else None

    async def exchange(self, request: bytes) -> Reply:
        """Send a request and wait for the end of its reply. A failure is a reply with an error."""
        loop = asyncio.get_running_loop()
        exchanged = _Exchange(self, request, loop.create_future())
        limit = asyncio.timeout(self._endpoint.timeout_s)
        self.running += 1
        try:
            async with limit:
                await loop.create_connection(lambda: exchanged, self._host, self._port, ssl=self._tls)
                return await asyncio.shield(exchanged.done)  # not cancelled by the timeout, which sets its own result
        except OSError as error:  # includes TimeoutError, which a connection that times out in the kernel raises too
            if limit.expired():
                exchanged.abort("timeout", f"no whole answer within {self._endpoint.timeout_s} s")
            else:
                exchanged.fail("no connection", f"cannot connect to {self._endpoint.url}: {error}")
        finally:
            self.running -= 1
        return exchanged.reply


class _Exchange(asyncio.Protocol):
    """The exchange of one request and its reply, on its own connection."""

    def __init__(self, sender: RequestSender, request: bytes, done: "asyncio.Future[Reply]") -> None:
        self.done = done
        self._sender = sender
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._sent_at = self._first_at = self._last_at = self._now = time.perf_counter()
        self._started = self._streamed = self._until_close = False
        self._body = bytearray()
        self._gaps = array("f")
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent_at = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._until_close:
            self.on_message_complete()
        reason = error or "closed by the server"
        self.fail("connection lost", f"the connection was lost before the answer's end: {reason}")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._until_close = True  # unless a header has the length of the body

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._streamed = value.startswith(b"text/event-stream")
            case b"content-length" | b"transfer-encoding":
                self._until_close = False

    def on_body(self, body: bytes) -> None:
        if b'"text"' in body or (b'content"' in body and _CHAT_TEXT.search(body)):
            self._take_text()
        self._body += body
        if self._streamed and len(self._body) > 2 * _TAIL:
            del self._body[:-_TAIL]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        completion = _COMPLETION_TOKENS.findall(self._body)
        if status == 200 and completion:
            prompt = _PROMPT_TOKENS.findall(self._body)
            self._settle(int(prompt[-1]) if prompt else 0, int(completion[-1]))
        else:
            self.fail(self._kind(status), f"status {status}: {bytes(self._body[-_SHOWN:]).decode(errors='replace')}")
        if self._transport is not None:
            self._transport.close()

    # The end of the exchange.

    @property
    def reply(self) -> Reply:
        """The reply, after the end of the exchange."""
        return self.done.result()

    def fail(self, kind: str, reason: str) -> None:
        """End the exchange with an error, unless it has ended."""
        self._settle(0, 0, reason, kind)

    def abort(self, kind: str, reason: str) -> None:
        """End the exchange with an error, and close the connection."""
        self.fail(kind, reason)
        if self._transport is not None:
            self._transport.abort()

    def _take_text(self) -> None:
        now = self._now
        self._sender.arrivals += 1
        if not self._started:
            self._started, self._first_at = True, now
        elif now > self._last_at:  # several chunks may arrive together
            self._gaps.append(now - self._last_at)
        self._last_at = now

    def _kind(self, status: int) -> str:
        if status != 200:
            return f"HTTP {status}"
        return "error in the stream" if b'"error"' in self._body else "no usage"

    def _settle(self, prompt_tokens: int, completion_tokens: int, error: str = "", kind: str = "") -> None:
        if not self.done.done():
            times = (self._sent_at, self._first_at, self._last_at, time.perf_counter())
            self.done.set_result(Reply(*times, prompt_tokens, completion_tokens, error, kind, self._gaps))
