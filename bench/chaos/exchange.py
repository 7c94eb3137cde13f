"""One request and its answer over HTTP."""

import json
import socket
from collections.abc import Callable
from typing import Any

import anyio
import httpx

from bench.chaos.answer import Answer, Defect, Stream, failed
from bench.chaos.questions import Question

_CONNECT_S = 30.0
# A peer that is gone without a word, such as one that was started anew behind a partition, is found after so long.
_PEER_GONE_S = 30
_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PEER_GONE_S // 5 - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_GONE_S * 1000),
]


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's pool closes connections that were idle for long, now and then one that it has just given to a request
    (httpcore 1.0). That is no server's doing: the request is sent again."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        while True:
            try:
                return await super().handle_async_request(request)
            except httpx.NetworkError as error:
                if not any(isinstance(cause, anyio.ClosedResourceError) for cause in error.__cause__.args):
                    raise


def http_client(connections: int) -> httpx.AsyncClient:
    """Without a limit of time for answers: whoever asks has one of its own."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = _Transport(limits=limits, socket_options=_OPTIONS)
    return httpx.AsyncClient(transport=transport, trust_env=False, timeout=httpx.Timeout(None, connect=_CONNECT_S))


async def ask_whole(http: httpx.AsyncClient, url: str, question: Question) -> Answer:
    """Raises ``Defect``, or ``httpx.TransportError`` when the connection breaks."""
    response = await http.post(url + question.path, json=question.body)
    if response.status_code != httpx.codes.OK:
        raise _refused(response.status_code, response.content)
    return read(response.content)


def read(content: bytes) -> Answer:
    """A whole answer."""
    answer = Answer()
    try:
        answer.add(json.loads(content))
    except (ValueError, KeyError) as error:
        raise Defect("wrong", f"no answer ({error!r}): {content[:500]!r}") from error
    return answer


async def ask_stream(
    http: httpx.AsyncClient, url: str, question: Question, stream: Stream, progress: Callable[[], Any]
) -> Answer:
    """As ``ask_whole``; ``stream`` keeps what has come, and ``progress`` is called whenever events have."""
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
