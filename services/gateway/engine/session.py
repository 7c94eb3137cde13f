"""An open Session stream to one scheduler. It carries many requests, and has a reader, a writer and heartbeats."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import numpy as np

from services.common.errors import Overloaded, PayloadTooLarge, Unavailable
from services.common.rpc.channel import MAX_PUBLIC_MESSAGE_BYTES
from services.common.rpc.status import from_rpc_error, from_status
from services.gateway.engine import codec
from services.gateway.engine.active_request import ActiveRequest, ActiveSample, SchedulerRequest
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.sample_slots import SampleSlots
from services.gateway.engine.session_owner import Owner
from services.gateway.engine.spans import join_spans
from tokasaurus.scheduler.v1 import session_pb2

MAX_OUTBOX = 65_536
MAX_BACKLOG = 512  # messages to be written; with more, further requests wait
# Requests in one message. A larger message would delay heartbeats and cancellations.
_MAX_JOINED, _MAX_JOINED_BYTES = 64, 64 * 1024
SessionStream: TypeAlias = grpc.aio.StreamStreamCall[session_pb2.SessionRequest, session_pb2.SessionResponse]


@dataclass(frozen=True)
class Timings:
    """Timeouts and intervals of a session, in seconds."""

    open_timeout: float = 10.0  # from the start of the stream to SessionOpened
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0  # without an answer for this time, the scheduler is considered hung
    first_backoff: float = 0.1
    last_backoff: float = 2.0
    wait_for_ready: float = 10.0  # a request waits at most this long for the first scheduler, or without failover
    failover: float = 120.0  # a new or lost request waits at most this long for a scheduler; 0: no failover
    # Requests stay this long with a scheduler that is not ready while another one is ready. What its worker had
    # computed is lost anyway, so the time is only for a new connection to the worker.
    move_after: float = 3.0


class Session:
    """A stream of a ``Replica``, its ``owner``. All methods run on the gateway's event loop.

    ``run`` does not return: it raises the reason for the end of the stream. The session sends no events after that.
    ``abandon`` returns the samples that were on it.
    """

    def __init__(
        self,
        stream: SessionStream,
        metrics: RequestMetrics,
        owner: Owner,
        timings: Timings,
        *,
        takes_submits: bool = False,
        controls_stragglers: bool = False,
    ) -> None:
        """``takes_submits``: the scheduler accepts several requests in one message.

        ``controls_stragglers``: it can end and park samples. Another one would end the session if it was asked to.
        """
        self.unreported_tokens = 0  # submitted since the last Load
        self._stream = stream
        self._metrics = metrics
        self._owner = owner
        self._timings = timings
        self._takes_submits = takes_submits
        self._controls_stragglers = controls_stragglers
        self._outbox: deque[session_pb2.SessionRequest] = deque()
        # Handles by action, in order, until they are sent or their samples have ended.
        self._actions: dict[codec.SampleAction, dict[int, None]] = {"cancel": {}, "end": {}, "park": {}}
        self._has_mail, self._has_room = asyncio.Event(), asyncio.Event()
        self._ended = False
        self._samples: dict[int, ActiveSample | None] = {}  # by handle, until its Finish; None: cancelled or abandoned
        self.unaccepted: dict[int, SchedulerRequest] = {}  # by first handle
        self._slots = SampleSlots()
        self._beats_answered = 0
        self._written = self._received = 1  # messages; both sides have sent their first
        self._last_step_at = -1.0

    def submit(self, request: SchedulerRequest) -> None:
        """Send ``request``. Its active request receives the acceptance, the tokens and the endings.

        Raises ``Overloaded``. Raises ``PayloadTooLarge`` for a message that the scheduler would not read, since such a
        message ends the session with all its requests.
        """
        if len(self._outbox) >= MAX_OUTBOX:
            raise Overloaded("too many requests are on their way to the scheduler; send it again", retry_after_s=1.0)
        message = codec.encode_submit(request.submission)
        if (size := message.ByteSize()) > MAX_PUBLIC_MESSAGE_BYTES:
            raise PayloadTooLarge(f"the request is {size} bytes for the scheduler: at most {MAX_PUBLIC_MESSAGE_BYTES}")
        handle = message.submit.handle = self._slots.take(len(request.samples), per_token=request.parent.per_token)
        self._samples.update(enumerate(request.samples, handle))
        self.unaccepted[handle] = request
        request.holder, request.handle, request.sent = self, handle, request.samples
        self.unreported_tokens += request.submission.most_tokens
        self._outbox.append(message)
        self._has_mail.set()
        if (action := request.due_action) is not None:
            self.act_on(request, action)

    async def room(self) -> None:
        """Wait until at most ``MAX_BACKLOG`` messages are to be written, or the session has ended."""
        while len(self._outbox) > MAX_BACKLOG and not self._ended:
            self._has_room.clear()
            await self._has_room.wait()
        await asyncio.sleep(0)  # the owner notices the end of its session

    async def run(self) -> None:
        """Serve the stream until it ends, and raise the reason as a ``TokaError``."""
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
            self._ended = True
            self._has_room.set()

    @property
    def backlog(self) -> int:
        """Number of messages that are to be written."""
        return len(self._outbox)

    def begun(self) -> set[ActiveRequest]:
        """Return the active requests that have tokens of this session."""
        handles = {handle: sample for handle, sample in self._samples.items() if sample is not None}
        return {sample.request for handle, sample in handles.items() if len(self._slots.tokens(handle))}

    def abandon(self, *, include_lost: bool = True) -> dict[ActiveSample, np.ndarray]:
        """Give up all unfinished samples, and return them with their tokens (uint32).

        If ``include_lost`` is False, keep samples that were lost before and have received no token since.
        """
        unfinished = {handle: sample for handle, sample in self._samples.items() if sample is not None}
        leaving = {handle: sample for handle, sample in unfinished.items() if include_lost or not sample.losses}
        for handle, sample in leaving.items():
            self._keep_spans(handle, sample)
        self._cancel_samples(list(leaving))
        return {sample: self._slots.tokens(handle) for handle, sample in leaving.items()}

    def act_on(self, request: SchedulerRequest, action: codec.SampleAction) -> None:
        """Cancel, end or park the samples of ``request`` that still run here, if the scheduler can."""
        handles = self._running(request)
        if action == "cancel":
            self._cancel_samples(handles)
        elif self._controls_stragglers:
            self._send_action(action, handles)

    def count_tokens(self, request: SchedulerRequest) -> int:
        """Return the number of tokens that the running samples of ``request`` have received here."""
        return sum(len(self._slots.tokens(handle)) for handle in self._running(request))

    def _running(self, request: SchedulerRequest) -> list[int]:
        """Return the handles of the samples of ``request`` that have not ended, here or elsewhere."""
        return [
            handle for handle, sample in enumerate(request.sent, request.handle) if self._samples.get(handle) is sample
        ]

    def _cancel_samples(self, handles: Sequence[int]) -> None:
        """Cancel the samples of ``handles``, and ignore their further tokens."""
        self._samples |= dict.fromkeys(handles)
        self._send_action("cancel", handles)

    def _send_action(self, action: codec.SampleAction, handles: Sequence[int]) -> None:
        if handles:
            self._actions[action] |= dict.fromkeys(handles)
            self._has_mail.set()

    # The three tasks of ``run``.

    async def _read(self) -> None:
        while True:
            message: Any = await self._stream.read()  # a SessionResponse, or the end
            if message is grpc.aio.EOF:
                raise Unavailable("the scheduler closed the session")
            if message is None:  # gRPC could not decode the message
                raise Unavailable("the scheduler sent a message that cannot be read", reason=codec.MESSAGES_LOST)
            match message.WhichOneof("payload"):
                case "outputs":
                    self._on_outputs(codec.decode_outputs(message.outputs))
                case "load":
                    self.unreported_tokens = 0
                    self._owner.loaded(message.load)
                case "acceptance":
                    self._on_acceptance(message.acceptance.handle)
                case "acceptances":
                    for acceptance in message.acceptances.acceptances:
                        self._on_acceptance(acceptance.handle)
                case "rejection":
                    self._on_rejection(message.rejection)
                case "heartbeat":
                    codec.check_count(message.heartbeat, self._received)
                    self._beats_answered = max(self._beats_answered, message.heartbeat.nonce)
            self._received += 1

    async def _write(self) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._outbox:
                message = self._next()
                if len(self._outbox) <= MAX_BACKLOG:
                    self._has_room.set()
                if message.HasField("heartbeat"):
                    message.heartbeat.messages_before = self._written
                await self._stream.write(message)
                self._written += 1
            for action, waiting in self._actions.items():  # after the requests that they concern
                if waiting:
                    handles = list(waiting)
                    waiting.clear()
                    await self._stream.write(codec.encode_action(action, handles))
                    self._written += 1

    def _next(self) -> session_pb2.SessionRequest:
        """Take the next message from the outbox. Consecutive short requests become one message."""
        first = self._outbox.popleft()
        if not self._takes_submits or not first.HasField("submit"):
            return first
        requests, size = [first], first.ByteSize()
        while self._outbox and len(requests) < _MAX_JOINED and self._outbox[0].HasField("submit"):
            size += self._outbox[0].ByteSize()
            if size > _MAX_JOINED_BYTES:
                break
            requests.append(self._outbox.popleft())
        return codec.join_submits(requests)

    async def _beat(self) -> None:
        """Send heartbeats. Raises ``Unavailable`` if the scheduler does not answer them.

        The timeout is counted in intervals, not in wall time, so that a gateway that was suspended does not blame the
        scheduler.
        """
        sent, answered, waited_s = 0, 0, 0.0
        while waited_s < self._timings.heartbeat_timeout:
            sent += 1
            self._outbox.appendleft(codec.encode_heartbeat(sent))  # before the requests, which may be thousands
            self._has_mail.set()
            await asyncio.sleep(self._timings.heartbeat_interval)
            waited_s = 0.0 if self._beats_answered > answered else waited_s + self._timings.heartbeat_interval
            answered = self._beats_answered
        raise Unavailable(f"the scheduler has not answered for {waited_s:.0f} s", reason="SCHEDULER_HUNG")

    # Events from the reader.

    def _on_acceptance(self, handle: int) -> None:
        request = self.unaccepted.pop(handle, None)
        if request is not None and not request.accepted and self._wanted(handle, request):
            request.accepted = True
            with request.parent.failing_on_errors("an acceptance could not be processed"):
                request.parent.on_accepted()

    def _on_rejection(self, rejection: session_pb2.Rejection) -> None:
        request = self.unaccepted.pop(rejection.handle, None)
        if request is None:
            return
        wanted = self._wanted(rejection.handle, request)
        for handle in range(rejection.handle, rejection.handle + len(request.samples)):
            self._end(handle)
        if not wanted:
            return
        with request.parent.failing_on_errors("a rejection could not be processed"):
            self._owner.refused(request, from_status(rejection.status))

    def _wanted(self, first: int, request: SchedulerRequest) -> bool:
        """Return whether ``request`` is neither closed nor abandoned."""
        return self._samples.get(first) is request.samples[0]

    def _on_outputs(self, step: codec.StepTokens) -> None:
        for handle, scores in step.prompts:
            sample = self._samples.get(handle)
            if sample is None:
                continue
            with sample.request.failing_on_errors("log-probabilities of a prompt could not be processed"):
                sample.request.add_prompt_scores(sample.prompt_index, scores)
        slots, handles = self._slots, step.handles
        if len(handles):
            if handles.max() >= len(slots.taken) or not slots.taken[handles].all():
                raise Unavailable("the scheduler sent tokens for a handle that no sample has")
            last = slots.last_at[handles]
            self._note_times(handles, last, step.counts)
            self._store(step)
            per_token = slots.per_token[handles]
            if per_token.any():
                self._pass_tokens(step, per_token & (last == 0), per_token & (last != 0))
        for handle, start, experts in step.routed:
            sample = self._samples.get(handle)
            if sample is not None and sample.experts is not None:
                with sample.request.failing_on_errors("experts of tokens could not be processed"):
                    sample.experts.add(start, experts)
        lost: dict[ActiveSample, np.ndarray] = {}
        incomplete: Unavailable | None = None
        for handle, ending in step.endings:
            if (sample := self._samples.get(handle)) is not None and ending.error is not None:
                self._keep_spans(handle, sample)
            sample, ids = self._end(handle)
            if sample is None:
                continue
            if isinstance(ending.error, Unavailable):  # another scheduler may continue it
                lost[sample], reason = ids, ending.error
                continue
            if ending.error is None and ending.completion_tokens > (count := len(sample.earlier_ids) + len(ids)):
                incomplete = Unavailable(
                    f"{count} of {ending.completion_tokens} tokens were received from the scheduler; send the request"
                    " again",
                    reason=codec.MESSAGES_LOST,
                )
                sample.request.fail(incomplete)
                continue
            with sample.request.failing_on_errors("an ending could not be processed"):
                self._finish(sample, ids, ending)
        if lost:
            self._owner.lose(lost, reason)
        if incomplete is not None:
            raise incomplete

    def _finish(self, sample: ActiveSample, ids: np.ndarray, ending: codec.SampleEnding) -> None:
        if not sample.request.per_token:
            sample.new_ids = np.concatenate((sample.earlier_ids, ids)) if len(sample.earlier_ids) else ids
        self._metrics.sample_finished(ending)
        sample.request.finish(sample, ending)

    def _end(self, handle: int) -> tuple[ActiveSample | None, np.ndarray]:
        """Free a handle. Return its sample, or None if that was cancelled, and the tokens stored for it."""
        for waiting in self._actions.values():
            waiting.pop(handle, None)  # sent later, it would act on the handle's next sample
        return self._samples.pop(handle, None), self._slots.give(handle)

    def _keep_spans(self, handle: int, sample: ActiveSample) -> None:
        """Record which weights generated the tokens of a sample that this scheduler does not finish."""
        sample.earlier_spans = join_spans(sample.earlier_spans, self._slots.spans(handle))

    def _note_times(self, handles: np.ndarray, last: np.ndarray, counts: np.ndarray | None) -> None:
        """Observe latencies since ``last``. Several tokens in one message count as evenly spaced."""
        now, last_step_at, slots = time.perf_counter(), self._last_step_at, self._slots
        slots.last_at[handles] = now
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
            sample = self._samples.get(handle)
            if sample is None or not count:
                continue
            if before:
                self._metrics.inter_token.observe((now - before) / count, count)
                continue
            sample.losses = sample.sole_suspect_losses = 0
            if sample.request.first_token_at is None:
                sample.request.first_token_at = now

    def _store(self, step: codec.StepTokens) -> None:
        """Store all tokens. An answer that is not streamed consists of them, and failover continues from them."""
        slots = self._slots
        slots.change_weights(step.weights_version)
        if step.counts is None:
            slots.store(step.handles, step.token_ids)
            return
        starts = np.cumsum(step.counts) - step.counts
        for index in range(int(step.counts.max())):  # each handle's first token, then each handle's second
            rows = step.counts > index
            slots.store(step.handles[rows], step.token_ids[starts[rows] + index])

    def _pass_tokens(self, step: codec.StepTokens, *masks: np.ndarray) -> None:
        """Pass the tokens of the handles in each mask to their requests, whose streams continue in this order."""
        ids, logprobs = step.token_ids.tolist(), step.logprobs
        counts = np.ones(len(step.handles), np.int64) if step.counts is None else step.counts
        ends = np.cumsum(counts)
        rows = np.concatenate([np.flatnonzero(mask) for mask in masks])
        columns = (step.handles[rows].tolist(), (ends - counts)[rows].tolist(), ends[rows].tolist())
        for handle, start, end in zip(*columns, strict=True):
            sample = self._samples.get(handle)
            if sample is None:
                continue
            entries = logprobs[start:end] if logprobs is not None else None
            with sample.request.failing_on_errors("tokens could not be processed"):
                sample.request.add_tokens(sample, ids[start:end], entries)
