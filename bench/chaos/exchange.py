"""The exchange of a request and its answer over HTTP."""

import json
import socket
from collections.abc import Callable
from typing import Any

import anyio
import httpx

from bench.chaos.answer import Answer, Defect, Stream, failed
from bench.chaos.questions import Question

_CONNECT_S = 30.0
# Time after which a peer without a sign of life counts as lost, such as a gateway that restarted behind a partition.
_PEER_GONE_S = 30
_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PEER_GONE_S // 5 - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_GONE_S * 1000),
]


class _Transport(httpx.AsyncHTTPTransport):
    """A transport that repeats requests which httpx itself fails.

    Its pool closes idle connections, and may close a connection just after assigning it to a request (httpcore 1.0).
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        while True:
            try:
                return await super().handle_async_request(request)
            except httpx.NetworkError as error:
                if not any(isinstance(cause, anyio.ClosedResourceError) for cause in error.__cause__.args):
                    raise


def http_client(connections: int) -> httpx.AsyncClient:
    """Return a client without a timeout for answers, since callers have their own timeouts."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = _Transport(limits=limits, socket_options=_OPTIONS)
    return httpx.AsyncClient(transport=transport, trust_env=False, timeout=httpx.Timeout(None, connect=_CONNECT_S))


async def ask_whole(http: httpx.AsyncClient, url: str, question: Question) -> Answer:
    """Return the answer without streaming. Raises ``Defect``, or ``httpx.TransportError`` if the connection breaks."""
    response = await http.post(url + question.path, json=question.body)
    if response.status_code != httpx.codes.OK:
        raise _refused(response.status_code, response.content)
    return read(response.content)


def read(content: bytes) -> Answer:
    """Parse a whole answer."""
    answer = Answer()
    try:
        answer.add(json.loads(content))
    except (ValueError, KeyError) as error:
        raise Defect("wrong", f"no answer ({error!r}): {content[:500]!r}") from error
    return answer


async def ask_stream(
    http: httpx.AsyncClient, url: str, question: Question, stream: Stream, progress: Callable[[], Any]
) -> Answer:
    """Return the streamed answer. ``stream`` keeps the events, and ``progress`` is called after new ones.

    Raises the errors of ``ask_whole``.
    """
    body = question.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", url + question.path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise _refused(response.status_code, await response.aread())
        async for data in response.aiter_bytes():
            if stream.feed(data):
                progress()
    return stream.end()


def _refused(status: int, content: bytes) -> Defect:
    return failed(f"status {status}: {content[:500].decode(errors='replace')}")
