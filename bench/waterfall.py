"""The stages of a request until its first token, from traced requests that are a part of a load."""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from services.cli.bench.exchange import Endpoint, Reply, RequestSender
from services.cli.bench.sending import Bodies
from services.common.process.tracing import HEADER
from tests.fakes.collector import Collector, Span

# Each stage ends where the next one begins: the first at the client's request, the last at the arrival of the text.
STAGES = {
    "ingress": "client and connection, until the gateway has the head of the request",
    "gateway": "read, check and tokenise the request, and send it to the scheduler",
    "queue": "until the scheduler admits the request",
    "plan": "finish the plan, and send it to the worker",
    "worker": "wait for earlier steps, and compute the prompt and its first token",
    "result": "return the result to the scheduler, which takes it",
    "egress": "session, gateway, text, SSE, connection and client",
}
_SETTLE_S = 3.0  # until the services have sent their last spans


@dataclass(frozen=True)
class Waterfall:
    """Milliseconds of a request in each of ``STAGES``, and in all of them."""

    stages: dict[str, float]

    @property
    def first_token_ms(self) -> float:
        """Time to the first token, as the client sees it."""
        return sum(self.stages.values())

    @classmethod
    def of(cls, reply: Reply, spans: Sequence[Span], offset_ns: int) -> "Waterfall | None":
        """Return the stages of a traced request, or None if a span is missing.

        ``offset_ns`` is the difference between the time of spans and that of replies.
        """
        found = {(each.service.removeprefix("toka-"), each.name.split()[0]): each for each in spans}
        try:
            http, request = found["gateway", "POST"], found["scheduler", "request"]
            queue, prefill, computed = (
                found[key] for key in (("scheduler", "queue"), ("scheduler", "prefill"), ("worker", "prefill"))
            )
        except KeyError:
            return None
        sent, arrived = (round(1e9 * at) + offset_ns for at in (reply.sent_at, reply.first_at))
        ends = [http.start, request.start, queue.end, computed.start, computed.end, prefill.end, arrived]
        begins = [sent, *ends[:-1]]
        return cls({name: (end - begin) * 1e-6 for name, begin, end in zip(STAGES, begins, ends, strict=True)})


def mean(waterfalls: Sequence[Waterfall]) -> dict[str, float]:
    """Return the mean milliseconds of each stage. Empty without requests."""
    count = len(waterfalls)
    return {name: sum(each.stages[name] for each in waterfalls) / count for name in STAGES} if count else {}


class Probes:
    """Requests with a trace, sent one after the other by a thread."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._replies: dict[str, Reply] = {}  # by the id of their trace
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def output_tokens(self) -> int:
        """Number of tokens of the requests that were answered and are not forgotten."""
        return sum(reply.completion_tokens for reply in self._replies.values())

    @contextmanager
    def sending(self, endpoint: Endpoint, body: Bodies, rate: float) -> Iterator[None]:
        """Send ``rate`` requests a second, which arrive at random (Poisson), while the context is open."""
        ended = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._send(endpoint, body, rate, ended)))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def waterfalls(self) -> list[Waterfall]:
        """Return the stages of all requests so far that were answered and have all their spans, and forget these."""
        deadline = time.monotonic() + _SETTLE_S
        replies, self._replies = self._replies, {}
        while True:
            traces = self._collector.traces
            found = [Waterfall.of(reply, traces.get(trace, ()), self._offset_ns) for trace, reply in replies.items()]
            complete = [each for each in found if each is not None]
            if len(complete) == len(replies) or time.monotonic() > deadline:
                return complete
            time.sleep(0.1)

    async def _send(self, endpoint: Endpoint, body: Bodies, rate: float, ended: threading.Event) -> None:
        sender, sending, number = RequestSender(endpoint), set[asyncio.Task[None]](), 0
        rng = np.random.default_rng(11)
        while not await asyncio.to_thread(ended.wait, rng.exponential(1 / rate)):
            sending.add(asyncio.create_task(self._send_one(sender, endpoint.encode(body(number)))))
            number += 1
        await asyncio.gather(*sending)

    async def _send_one(self, sender: RequestSender, request: bytes) -> None:
        trace = secrets.token_hex(16)
        header = f"\r\n{HEADER}: 00-{trace}-{secrets.token_hex(8)}-01\r\n".encode()
        reply = await sender.exchange(request.replace(b"\r\n", header, 1))
        if not reply.error:
            self._replies[trace] = reply
