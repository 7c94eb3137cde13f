"""A client process: sends its share of the requests on an event loop, and reports. It imports little to start fast."""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from services.cli.bench.exchange import Endpoint, Reply, RequestSender
from services.common.boundaries import errors_to

Body = dict[str, Any]
Bodies = Callable[[int], Body]  # returns the body of a request number. Client processes get it pickled


@dataclass(frozen=True)
class Share:
    """The requests that one process sends."""

    numbers: Sequence[int]  # of the requests, in order
    body: Bodies
    due: Sequence[float] | None = None  # seconds from the start, by position. None: as soon as possible
    concurrency: int | None = None  # maximum number of running requests. None: no limit
    seconds: float | None = None  # time after the start at which no further request begins


@dataclass
class ClientReport:
    """The progress of a process since its last report."""

    client: int  # number of the process
    replies: list[tuple[int, Reply]] = field(default_factory=list)  # request numbers and replies
    running: int = 0  # requests without a whole reply
    arrivals: int = 0  # arrivals of text since the last report
    busy: float | None = None  # share of a core that the process used, in its last report
    trouble: str = ""  # error that ended the process, or empty


def send_share(pipe: Connection) -> None:
    """Run a client process: receive a share, report readiness, receive the start time, send, and report."""
    index, endpoint, share, period_s = pipe.recv()
    with errors_to(lambda error: pipe.send(ClientReport(index, trouble="".join(traceback.format_exception(error))))):
        client = _Client(index, pipe, endpoint, share)
        pipe.send(ClientReport(index))
        asyncio.run(client.run(pipe.recv(), period_s))


class _Client:
    """The sender of a client process, on its event loop."""

    def __init__(self, index: int, pipe: Connection, endpoint: Endpoint, share: Share) -> None:
        self._index = index
        self._pipe = pipe
        self._endpoint = endpoint
        self._share = share
        self._sender = RequestSender(endpoint)
        self._replies: list[tuple[int, Reply]] = []
        self._reported = 0  # arrivals of text
        at_once = share.due is None and share.concurrency is None
        # Requests that are sent all at once are encoded before the start. Others are encoded one by one.
        self._encoded = [self._encode(number) for number in share.numbers] if at_once else []

    async def run(self, start: float, period_s: float | None) -> None:
        """Send all requests of the share, beginning at ``start``, and report."""
        await asyncio.sleep(start - time.perf_counter())
        cpu = time.process_time()
        reporting = None if period_s is None else asyncio.create_task(self._report_every(period_s))
        await self._send_all(start)
        if reporting is not None:
            reporting.cancel()
        self._report((time.process_time() - cpu) / (time.perf_counter() - start))

    async def _send_all(self, start: float) -> None:
        share = self._share
        if share.concurrency is not None:
            numbers = iter(share.numbers)
            await asyncio.gather(*(self._one_by_one(numbers, start) for _ in range(share.concurrency)))
        elif share.due is not None:
            async with asyncio.TaskGroup() as group:
                for number, due in zip(share.numbers, share.due, strict=True):
                    request = self._encode(number)
                    await asyncio.sleep(start + due - time.perf_counter())
                    group.create_task(self._exchange(number, request))
        else:
            await asyncio.gather(*map(self._exchange, share.numbers, self._encoded))

    async def _one_by_one(self, numbers: Iterable[int], start: float) -> None:
        """Send requests one after the other. Several tasks take their numbers from the same iterator."""
        end = None if self._share.seconds is None else start + self._share.seconds
        for number in numbers:
            if end is not None and time.perf_counter() >= end:
                return
            await self._exchange(number, self._encode(number))

    async def _exchange(self, number: int, request: bytes) -> None:
        reply = await self._sender.exchange(request)
        self._replies.append((number, reply))  # read after the await, since a report replaces the list

    def _encode(self, number: int) -> bytes:
        return self._endpoint.encode(self._share.body(number))

    async def _report_every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._report()

    def _report(self, busy: float | None = None) -> None:
        replies, self._replies = self._replies, []
        arrivals = self._sender.arrivals - self._reported
        self._reported = self._sender.arrivals
        self._pipe.send(ClientReport(self._index, replies, self._sender.running, arrivals, busy))
