"""A client that costs little: it must not be what a measurement measures.

HTTP/1.1 on bare asyncio connections with httptools' parser; several processes, each with its share of the requests,
which all send at the same moment. An answer's text is not kept: only when it came and how many tokens it has.
"""

import asyncio
import json
import multiprocessing
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any
from urllib.parse import urlsplit

import httptools

from services.common.process import allow_connections

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_TAIL = 4096  # bytes of a stream that are kept, for the usage in its last event
_START_S = 60.0  # for a client process to be there
_SETTLE_S = 0.1  # from the last client's readiness to the moment when all send


@dataclass(frozen=True)
class Reply:
    """What came back for one request. Times are of ``time.perf_counter``, which all processes of a host share."""

    sent_at: float
    first_at: float  # the first bytes with text in them
    last_at: float  # the last such bytes
    ended_at: float
    prompt_tokens: int  # of usage
    completion_tokens: int
    error: str = ""  # why there is no answer, else empty


def send_all(
    url: str, bodies: Sequence[dict[str, Any]], clients: int = 1, meanwhile: Callable[[], None] = lambda: None
) -> list[Reply]:
    """POST every body to ``url`` at once, from ``clients`` processes; replies in the order of ``bodies``.

    ``meanwhile`` is called again and again in this thread until all have answered; it should sleep a little itself.
    """
    requests = [_request(url, body) for body in bodies]
    allow_connections()
    context = multiprocessing.get_context("spawn")
    shares = [requests[first::clients] for first in range(min(clients, len(requests)))]
    pipes, processes = [], []
    try:
        for _ in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe, share in zip(pipes, shares, strict=True):
            pipe.send((url, share))
        for pipe in pipes:
            if not pipe.poll(_START_S):
                raise RuntimeError("a client process did not start in time")
            pipe.recv()
        meanwhile()
        start = time.perf_counter() + _SETTLE_S
        for pipe in pipes:
            pipe.send(start)
        answers: dict[Connection, list[Reply]] = {}
        while len(answers) < len(pipes):
            meanwhile()
            for pipe in wait([pipe for pipe in pipes if pipe not in answers], timeout=0.01):
                answers[pipe] = pipe.recv()
    finally:
        for process in processes:
            process.terminate()
            process.join()
    replies: list[Reply | None] = [None] * len(requests)
    for first, pipe in enumerate(pipes):
        replies[first :: len(shares)] = answers[pipe]
    return replies


def failures(replies: Sequence[Reply]) -> int:
    """How many requests got no answer; prints the first reason."""
    failed = [reply.error for reply in replies if reply.error]
    if failed:
        print(f"{len(failed)} of {len(replies)} requests failed, the first: {failed[0]}")
    return len(failed)


def makespan(replies: Sequence[Reply]) -> float:
    """Seconds from the first request to the last answer."""
    return max(reply.ended_at for reply in replies) - min(reply.sent_at for reply in replies)


def _client(pipe: Connection) -> None:
    """A client process: takes its requests, waits for the moment, sends all of them, hands the replies back."""
    url, requests = pipe.recv()
    pipe.send(None)
    try:
        pipe.send(asyncio.run(_exchange_all(url, requests, start=pipe.recv())))
    except Exception:
        now = time.perf_counter()
        pipe.send([Reply(now, now, now, now, 0, 0, traceback.format_exc())] * len(requests))


async def _exchange_all(url: str, requests: list[bytes], start: float) -> list[Reply]:
    loop, address = asyncio.get_running_loop(), urlsplit(url)

    async def exchange(request: bytes) -> Reply:
        exchanged = _Exchange(request, loop.create_future())
        try:
            await loop.create_connection(lambda: exchanged, address.hostname, address.port or 80)
        except OSError as error:
            exchanged.fail(f"cannot connect to {url}: {error}")
        return await exchanged.done

    await asyncio.sleep(start - time.perf_counter())
    return await asyncio.gather(*map(exchange, requests))


def _request(url: str, body: dict[str, Any]) -> bytes:
    address, content = urlsplit(url), json.dumps(body).encode()
    head = (
        f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer none\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, done: asyncio.Future) -> None:
        self.done = done
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._sent_at = self._first_at = self._last_at = self._now = time.perf_counter()
        self._started = self._streamed = False
        self._body = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._sent_at = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(f"the connection was lost before the answer's end: {error or 'closed by the server'}")

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streamed = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        if b'"text"' in body:
            self._last_at = self._now
            if not self._started:
                self._started, self._first_at = True, self._now
        self._body += body
        if self._streamed and len(self._body) > 2 * _TAIL:
            del self._body[:-_TAIL]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        completion = _COMPLETION_TOKENS.findall(self._body)
        if status != 200 or not completion:
            self.fail(f"status {status}: {bytes(self._body[-500:]).decode(errors='replace')}")
        else:
            prompt = _PROMPT_TOKENS.findall(self._body)
            self._settle(int(prompt[-1]) if prompt else 0, int(completion[-1]), "")
        self._transport.close()

    def fail(self, reason: str) -> None:
        """There is no answer, unless there was one already."""
        self._settle(0, 0, reason)

    def _settle(self, prompt_tokens: int, completion_tokens: int, error: str) -> None:
        if not self.done.done():
            times = (self._sent_at, self._first_at, self._last_at, time.perf_counter())
            self.done.set_result(Reply(*times, prompt_tokens, completion_tokens, error))
