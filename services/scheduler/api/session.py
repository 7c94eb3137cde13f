"""One Session stream: a reader that passes requests on, and one writer fed by a mailbox."""

import asyncio
from collections.abc import AsyncIterator

import structlog

from services.common.errors import FailedPrecondition, Internal, InvalidRequest, TokaError
from services.scheduler.api.encoding import encode_news
from services.scheduler.api.hub import Hub
from services.scheduler.api.mailbox import MergedDelta
from services.scheduler.api.model import ServedModel
from services.scheduler.api.prompt import needs_tokenizing, read_prompt
from services.scheduler.api.proofs import Proofs
from services.scheduler.api.validation import read_request
from services.scheduler.grammar.message import keep_long_text, name_of
from services.scheduler.grammar.prover import Prover
from services.scheduler.news import Accepted, Rejected
from tokasaurus.scheduler.v1 import session_pb2

log = structlog.get_logger(__name__)

# With so many requests before it, the step loop needs the interpreter more than the readers do: they pause.
_MOST_BACKLOG = 256
_PAUSE_S = 0.002


class Session:
    """Owned by its RPC, on the asyncio loop."""

    def __init__(self, hub: Hub, model: ServedModel, prover: Prover, scheduler_id: str) -> None:
        self._hub = hub
        self._model = model
        self._prover = prover
        self._scheduler_id = scheduler_id
        self._sink = 0
        self._undecided = 0  # submitted, neither accepted nor rejected
        self._live = 0  # accepted samples without a Finish
        self._half_closed = False
        self._error: Exception | None = None

    async def run(self, requests: AsyncIterator) -> AsyncIterator[session_pb2.SessionResponse]:
        """The responses, until the client is done and everything of its is finished."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("payload") != "open":
            raise InvalidRequest("the first message of a session must be `open`", field="open")
        opened = session_pb2.SessionOpened(scheduler_id=self._scheduler_id, model=self._model.message())
        self._sink, self._mailbox = self._hub.open(session=True)
        self._proofs = Proofs(self._hub.engine, self._prover, self._sink)
        log.info("session opened", client_id=first.open.client_id, sink=self._sink)
        reader = asyncio.create_task(self._read(requests))
        try:
            yield session_pb2.SessionResponse(opened=opened)
            while (item := await self._mailbox.get()) is not None:
                self._note(item)
                yield encode_news(item)
            if self._error is not None:
                raise self._error
        finally:
            reader.cancel()
            self._proofs.close()
            self._hub.close(self._sink)
            log.info("session closed", client_id=first.open.client_id, sink=self._sink)

    def _note(self, item: object) -> None:
        """Keep count, so that a session whose client sends no more ends behind its last Finish."""
        match item:
            case Accepted(request=request):
                self._undecided -= 1
                self._live += request.n
            case Rejected():
                self._undecided -= 1
            case MergedDelta():
                self._live -= len(item.finished)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._half_closed and not self._undecided and not self._live:
            self._mailbox.close()

    async def _read(self, requests: AsyncIterator) -> None:
        try:
            async for message in requests:
                await self._take(message)
                if self._hub.engine.backlog > _MOST_BACKLOG:
                    await asyncio.sleep(_PAUSE_S)
        except TokaError as error:  # the stream itself is wrong
            self._error = error
            self._mailbox.close()
            return
        self._half_closed = True
        self._close_if_done()

    async def _take(self, message: session_pb2.SessionRequest) -> None:
        match message.WhichOneof("payload"):
            case "submit":
                await self._submit(message.submit)
            case "cancel":
                self._hub.engine.cancel(self._sink, self._proofs.keep_cancels(message.cancel.handles))
            case "heartbeat":
                self._hub.engine.heartbeat(self._sink, message.heartbeat.nonce)
            case "open":
                raise FailedPrecondition("the session is open already: `open` is its first message only")
            case _:
                raise InvalidRequest("a session message without a payload that this version knows")

    async def _submit(self, submit: session_pb2.Submit) -> None:
        """In order of arrival, also while a text is tokenised: a cancel must not overtake its submit. A request whose
        grammar is new is passed by others, and its cancels wait for it."""
        self._undecided += 1
        message, model = submit.request, self._model
        try:
            model.check_name(message.model)
            if message.output.text:
                raise InvalidRequest("a session returns token ids only: leave text unset", field="output.text")
            if needs_tokenizing(message):
                tokens = await asyncio.to_thread(read_prompt, message, model)
            else:
                tokens = read_prompt(message, model)
            await keep_long_text(message.sampling)
            request = read_request(message, tokens, model, sink=self._sink, handle=submit.handle)
            self._proofs.check_handles(request)
            if grammar := request.sampling.grammar:
                name = name_of(message.sampling.grammar)
                if not self._prover.knows(grammar):
                    self._proofs.begin(request, name)
                    return
                await self._prover.prove(grammar, name)  # at once
        except TokaError as error:
            self._hub.engine.reject(self._sink, submit.handle, error)
            return
        except Exception as error:  # one request's trouble is not the session's
            log.error("a request could not be read", handle=submit.handle, exc_info=error)
            internal = Internal("internal error; the server's log has the details")
            self._hub.engine.reject(self._sink, submit.handle, internal)
            return
        self._hub.engine.submit(request)
