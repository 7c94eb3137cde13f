"""One open Session stream to one scheduler: many requests on it, one reader, one writer, in-band heartbeats."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np
import structlog

from services.common.errors import Overloaded, PayloadTooLarge, TokaError, Unavailable
from services.common.rpc.channel import MAX_PUBLIC_MESSAGE_BYTES
from services.common.rpc.status import from_rpc_error, from_status
from services.gateway.generation import Call, Choice
from services.gateway.metrics import RequestMetrics
from services.gateway.session import codec
from services.gateway.session.seats import Seats
from tokasaurus.scheduler.v1 import observe_pb2, session_pb2

log = structlog.get_logger(__name__)

MAX_OUTBOX = 65_536


@dataclass(frozen=True)
class Timings:
    """How patient the gateway is with a scheduler, in seconds."""

    open_timeout: float = 10.0  # for SessionOpened after the stream is made
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0  # without an answer the scheduler counts as hung
    first_backoff: float = 0.1
    last_backoff: float = 2.0
    wait_for_ready: float = 10.0  # how long a new request waits for a scheduler: a worker restarts in less


class Session:
    """Owned by a ``Replica``; all methods run on the gateway's event loop.

    ``run`` returns never: it raises why the stream ended, after which ``fail_all`` tells the requests on it.
    """

    def __init__(
        self,
        stream: grpc.aio.StreamStreamCall,
        metrics: RequestMetrics,
        on_load: Callable[[observe_pb2.Load], None],
        timings: Timings,
    ) -> None:
        self.unreported_tokens = 0  # submitted since the last Load
        self._stream = stream
        self._metrics = metrics
        self._on_load = on_load
        self._timings = timings
        self._outbox: deque[session_pb2.SessionRequest] = deque()
        self._cancels: dict[int, None] = {}  # handles in order, until they are sent or their samples have ended
        self._has_mail = asyncio.Event()
        self._samples: dict[int, Choice | None] = {}  # by handle, until its Finish; None: nobody wants it any more
        self._unaccepted: dict[int, Call] = {}  # by first handle
        self._seats = Seats()
        self._beats_answered = 0
        self._last_step_at = -1.0

    def submit(self, call: Call) -> None:
        """Send ``call``; its generation hears of acceptance, tokens and ending.

        Raises ``Overloaded``, or ``PayloadTooLarge``: a message that the scheduler will not read would end the session,
        and with it everybody's requests.
        """
        if len(self._outbox) >= MAX_OUTBOX:
            raise Overloaded("too many requests are on their way to the scheduler; send it again", retry_after_s=1.0)
        message = codec.encode_submit(call.job)
        if (size := message.ByteSize()) > MAX_PUBLIC_MESSAGE_BYTES:
            raise PayloadTooLarge(f"the request is {size} bytes for the scheduler: at most {MAX_PUBLIC_MESSAGE_BYTES}")
        handle = message.submit.handle = self._seats.take(len(call.choices), stored=not call.generation.fed)
        self._samples.update(enumerate(call.choices, handle))
        self._unaccepted[handle] = call
        call.cancel = partial(self._cancel, handle, call.choices)
        self.unreported_tokens += call.job.most_tokens
        self._outbox.append(message)
        self._has_mail.set()

    async def run(self) -> None:
        """Serve the stream until it ends; always raises a ``TokaError`` (or is cancelled)."""
        tasks = [asyncio.create_task(work()) for work in (self._read, self._write, self._beat)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            raise next(error for task in done if (error := task.exception()) is not None)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # written to after its end
            raise Unavailable("the connection to the scheduler ended") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fail_all(self, error: TokaError) -> None:
        """The stream is gone, and with it every request on it."""
        choices = [choice for choice in self._samples.values() if choice is not None]
        self._samples.clear()
        self._unaccepted.clear()
        for choice in choices:
            choice.generation.fail(error)

    def _cancel(self, first: int, choices: Sequence[Choice]) -> None:
        running = [handle for handle, choice in enumerate(choices, first) if self._samples.get(handle) is choice]
        for handle in running:
            self._samples[handle] = None
        if running:
            self._cancels |= dict.fromkeys(running)
            self._has_mail.set()

    # The three tasks of ``run``.

    async def _read(self) -> None:
        while True:
            message = await self._stream.read()
            if message is grpc.aio.EOF:
                raise Unavailable("the scheduler closed the session")
            match message.WhichOneof("payload"):
                case "outputs":
                    self._on_outputs(codec.decode_outputs(message.outputs))
                case "load":
                    self.unreported_tokens = 0
                    self._on_load(message.load)
                case "acceptance":
                    call = self._unaccepted.pop(message.acceptance.handle, None)
                    if call is not None:
                        call.generation.accepted()
                case "rejection":
                    self._on_rejection(message.rejection)
                case "heartbeat":
                    self._beats_answered = max(self._beats_answered, message.heartbeat.nonce)

    async def _write(self) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._outbox:
                await self._stream.write(self._outbox.popleft())
            if self._cancels:  # after the submits they are about
                cancels, self._cancels = list(self._cancels), {}
                await self._stream.write(codec.encode_cancel(cancels))

    async def _beat(self) -> None:
        """Counts intervals, not wall time: a gateway that was itself stopped does not blame the scheduler."""
        sent, answered, silent_s = 0, 0, 0.0
        while silent_s < self._timings.heartbeat_timeout:
            sent += 1
            self._outbox.append(codec.encode_heartbeat(sent))
            self._has_mail.set()
            await asyncio.sleep(self._timings.heartbeat_interval)
            silent_s = 0.0 if self._beats_answered > answered else silent_s + self._timings.heartbeat_interval
            answered = self._beats_answered
        raise Unavailable(f"the scheduler has not answered for {silent_s:.0f} s")

    # What the reader hears.

    def _on_rejection(self, rejection: session_pb2.Rejection) -> None:
        call = self._unaccepted.pop(rejection.handle, None)
        if call is not None:
            for handle in range(rejection.handle, rejection.handle + len(call.choices)):
                self._end(handle)
            call.generation.fail(from_status(rejection.status))

    def _on_outputs(self, news: codec.StepNews) -> None:
        for handle, scores in news.prompts:
            choice = self._samples.get(handle)
            if choice is not None:
                choice.generation.score(choice.prompt_index, scores)
        seats, handles = self._seats, news.handles
        if len(handles):
            if handles.max() >= len(seats.taken):
                raise Unavailable(f"the scheduler sent tokens for handle {handles.max()}, which was never given out")
            self._note_times(handles, news.counts)
            stored = seats.stored[handles]
            if stored.any():
                self._store(news, stored)
            if not stored.all():
                self._feed(news, stored)
        for handle, ending in news.endings:
            choice, ids = self._end(handle)
            if choice is not None:
                if len(ids):
                    choice.new_ids = ids
                self._metrics.sample_finished(ending)
                choice.generation.finish(choice, ending)

    def _end(self, handle: int) -> tuple[Choice | None, np.ndarray]:
        """Free a handle: who had it, and the tokens that were kept for it."""
        self._cancels.pop(handle, None)  # it would end the handle's next sample
        return self._samples.pop(handle, None), self._seats.give(handle)

    def _note_times(self, handles: np.ndarray, counts: np.ndarray | None) -> None:
        """Latencies. Several tokens in one message came at even distances, say."""
        now, last_step_at, seats = time.perf_counter(), self._last_step_at, self._seats
        last = seats.last_at[handles]
        seats.last_at[handles] = now
        self._last_step_at = now
        in_step = last == last_step_at
        if counts is not None:
            in_step &= counts == 1
        usual = int(np.count_nonzero(in_step))
        if usual:
            self._metrics.inter_token.observe(now - last_step_at, usual)
        if usual == len(handles):
            return
        tokens = np.ones(len(handles), np.int64) if counts is None else counts
        others = np.flatnonzero(~in_step)
        for handle, before, count in zip(*(a[others].tolist() for a in (handles, last, tokens)), strict=True):
            choice = self._samples.get(handle)
            if choice is None or not count:
                continue
            if before:
                self._metrics.inter_token.observe((now - before) / count, count)
            elif choice.generation.first_token_at is None:
                choice.generation.first_token_at = now

    def _store(self, news: codec.StepNews, stored: np.ndarray) -> None:
        """Keep the tokens of ``stored`` (bool, beside the handles) where nobody waits for each of them."""
        seats = self._seats
        if news.counts is None:
            whole = stored.all()
            seats.store(*((news.handles, news.token_ids) if whole else (news.handles[stored], news.token_ids[stored])))
            return
        starts = np.cumsum(news.counts) - news.counts
        for index in range(int(news.counts.max())):  # their first tokens, their second ones
            rows = stored & (news.counts > index)
            seats.store(news.handles[rows], news.token_ids[starts[rows] + index])

    def _feed(self, news: codec.StepNews, stored: np.ndarray) -> None:
        """Pass the other tokens on, one sample after the other."""
        ids, logprobs = news.token_ids.tolist(), news.logprobs
        counts = np.ones(len(news.handles), np.int64) if news.counts is None else news.counts
        ends = np.cumsum(counts)
        rows = np.flatnonzero(~stored)
        columns = (news.handles[rows].tolist(), (ends - counts)[rows].tolist(), ends[rows].tolist())
        for handle, start, end in zip(*columns, strict=True):
            choice = self._samples.get(handle)
            if choice is not None:
                entries = logprobs[start:end] if logprobs is not None else None
                choice.generation.feed(choice, ids[start:end], entries)
