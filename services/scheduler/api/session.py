"""Serves a Session stream: a task reads requests, and a writer sends the events of a mailbox."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

import structlog

from services.common.boundaries import errors_as_internal
from services.common.errors import FailedPrecondition, InvalidRequest, TokaError, Unavailable
from services.common.process.time_slice import TimeSlice
from services.scheduler.api.encoding import encode_by_handle, encode_event
from services.scheduler.api.hub import Hub
from services.scheduler.api.model import ServedModel
from services.scheduler.api.pending_grammars import PendingGrammars
from services.scheduler.api.resume import finish_of
from services.scheduler.api.traces import Traces
from services.scheduler.api.validation import read_message
from services.scheduler.core.output import Delta
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.events import Accepted, Rejected
from services.scheduler.grammar.checker import GrammarChecker
from services.scheduler.grammar.message import name_of
from tokasaurus.scheduler.v1 import session_pb2

log = structlog.get_logger(__name__)

# The reader pauses while more requests than this wait for the step loop, which then needs the interpreter.
_MOST_BACKLOG = 256
_PAUSE_S = 0.002
_MOST_SUBMITS = 1024  # in one message; an empty request takes 2 bytes there and 2 KB in memory
# Timeout of a client that has sent heartbeats. Its requests are cancelled, because it sends them to another scheduler.
# Gateways send a heartbeat every second.
_HEARTBEAT_TIMEOUT_S = 15

_Requests = AsyncIterator[session_pb2.SessionRequest]


class SessionStream:
    """State of one Session stream. Used on the event loop."""

    def __init__(self, hub: Hub, model: ServedModel, grammar_checker: GrammarChecker, scheduler_id: str) -> None:
        self._hub = hub
        self._model = model
        self._grammar_checker = grammar_checker
        self._scheduler_id = scheduler_id
        self._sink = 0
        self._undecided = 0  # requests that are neither accepted nor rejected
        self._live = 0  # accepted samples without a Finish
        self._half_closed = False
        self._seen = False  # a message arrived since the last heartbeat check
        self._taking = False  # a message is being processed, which may take long
        self._beats = False  # the client sends heartbeats
        self._received = 1  # messages, including `open`
        self._error: Exception | None = None
        self._traces = Traces(hub.tracing)

    async def run(self, requests: _Requests) -> AsyncGenerator[session_pb2.SessionResponse, None]:
        """Yield responses until the client has closed its side and all its requests have finished."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("payload") != "open":
            raise InvalidRequest("the first message of a session must be `open`", field="open")
        opened = session_pb2.SessionOpened(scheduler_id=self._scheduler_id, model=self._model.message())
        self._sink, self._mailbox = self._hub.open(session=True)
        self._pending = PendingGrammars(self._hub.engine, self._hub.unchecked, self._grammar_checker, self._sink)
        log.info("session opened", client_id=first.open.client_id, sink=self._sink)
        sent = 1
        tasks = [asyncio.create_task(self._read(requests)), asyncio.create_task(self._check_heartbeats())]
        try:
            yield session_pb2.SessionResponse(opened=opened)
            while (item := await self._mailbox.get()) is not None:
                self._note(item)
                response = self._encode(item)
                if response.HasField("heartbeat"):
                    response.heartbeat.messages_before = sent
                sent += 1
                yield response
            if self._error is not None:
                raise self._error
        finally:
            for task in tasks:
                task.cancel()
            self._pending.close()
            self._traces.close()
            self._hub.close(self._sink)
            log.info("session closed", client_id=first.open.client_id, sink=self._sink)

    def _encode(self, item: object) -> session_pb2.SessionResponse:
        """Encode an item. If the outputs of one request cannot be encoded, only that request fails."""
        try:
            return encode_event(item)
        except Exception:
            if not isinstance(item, Delta):
                raise
        outputs, failures = encode_by_handle(item)
        for handle, error in failures.items():
            log.error("an output could not be encoded", sink=self._sink, handle=handle, exc_info=error)
            self._hub.engine.ask(partial(Scheduler.fail, sink=self._sink, handle=handle, error=error))
        return session_pb2.SessionResponse(outputs=outputs)

    def _note(self, item: object) -> None:
        """Count unfinished requests, so that a half-closed session ends after its last finish."""
        match item:
            case Accepted(request=request):
                self._undecided -= 1
                self._live += request.n
                self._traces.accepted(request)
            case list() as items:
                for each in items:
                    self._note(each)
            case Rejected(handle=handle, error=error):
                self._undecided -= 1
                self._traces.rejected(handle, error)
            case Delta():
                self._live -= len(item.finished)
                self._traces.finished(item.finished)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._half_closed and not self._undecided and not self._live:
            self._mailbox.close()

    async def _check_heartbeats(self) -> None:
        """Cancel the client's requests after ``_HEARTBEAT_TIMEOUT_S`` seconds without a message.

        Only seconds in which this loop runs count, so a scheduler that was suspended does not blame the client.
        """
        silent = 0
        while silent < _HEARTBEAT_TIMEOUT_S:
            await asyncio.sleep(1.0)
            silent = 0 if self._seen or self._taking or not self._beats or self._half_closed else silent + 1
            self._seen = False
        # Closed now, because a write to the client may be blocked.
        self._hub.engine.ask(lambda core: core.close_sink(self._sink))
        error = Unavailable(f"the client has sent no message for {silent} s", reason="CLIENT_SILENT")
        self._mailbox.close(error)

    async def _read(self, requests: _Requests) -> None:
        try:
            with errors_as_internal(log, "a session could not be read", sink=self._sink):
                async for message in requests:
                    self._seen = self._taking = True
                    try:
                        await self._take(message)
                    finally:
                        self._taking = False
                    self._received += 1
                    await self._pause()
        except TokaError as error:  # the stream itself is invalid
            self._error = error
            self._mailbox.close()
            return
        self._half_closed = True
        self._close_if_done()

    async def _pause(self) -> None:
        """Yield the interpreter to the step loop if many requests wait for it."""
        if self._hub.engine.backlog > _MOST_BACKLOG:
            await asyncio.sleep(_PAUSE_S)

    async def _take(self, message: session_pb2.SessionRequest) -> None:
        match message.WhichOneof("payload"):
            case "submit":
                await self._submit(message.submit)
            case "submits":
                if (count := len(message.submits.submits)) > _MOST_SUBMITS:
                    text = f"submits has {count} requests: expected at most {_MOST_SUBMITS}; send several messages"
                    raise InvalidRequest(text, field="submits")
                self._mailbox.joins_acceptances = True
                time_slice = TimeSlice()
                for submit in message.submits.submits:
                    await self._submit(submit)
                    await self._pause()
                    if time_slice.is_over:
                        await time_slice.renew()
            case "cancel":
                self._pending.act_on(message.cancel.handles, Scheduler.cancel)
            case "end":
                self._pending.act_on(message.end.handles, Scheduler.end)
            case "park":
                self._pending.act_on(message.park.handles, Scheduler.park)
            case "heartbeat":
                self._beats = True
                if message.heartbeat.messages_before not in (0, self._received):
                    raise Unavailable(
                        f"{message.heartbeat.messages_before} messages were sent on the session and {self._received}"
                        " were received: the connection loses messages",
                        reason="MESSAGES_LOST",
                    )
                self._hub.engine.heartbeat(self._sink, message.heartbeat.nonce)
            case "open":
                raise FailedPrecondition("the session is open already: only its first message may be `open`")
            case _:
                raise InvalidRequest("the session message has no payload that this version supports")

    async def _submit(self, submit: session_pb2.Submit) -> None:
        """Submit a request in the order of arrival, so that no cancel overtakes its submit while a text is tokenised.

        Other requests overtake a request whose grammar is new. Its cancels wait for it.
        """
        self._undecided += 1
        try:
            with errors_as_internal(log, "a request could not be read", request_id=submit.request.request_id):
                request = await self._read_submit(submit)
        except TokaError as error:
            self._hub.engine.reject(self._sink, submit.handle, error)
            return
        if request is not None:
            self._hub.engine.submit(request)

    async def _read_submit(self, submit: session_pb2.Submit) -> Request | None:
        """Return the request to submit, or None if it has finished or its grammar is being checked."""
        message, model = submit.request, self._model
        if message.output.text:
            raise InvalidRequest("a session returns token ids only: leave text unset", field="output.text")
        request = await read_message(message, model, sink=self._sink, handle=submit.handle)
        self._pending.check_handles(request)
        self._traces.begin(request)
        if (finish := finish_of(request, model)) is not None:
            self._mailbox.put(Accepted(request))
            self._mailbox.put(Delta(0, finished=[finish]))
            return None
        if grammar := request.sampling.grammar:
            name = name_of(message.sampling.grammar)
            if not self._grammar_checker.is_cached(grammar):
                self._pending.begin(request, name)
                return None
            await self._grammar_checker.check(grammar, name)  # returns at once
        return request
