"""One scheduler as this gateway knows it: connected again and again, with its model, its load, and why not ready."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import numpy as np
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.rpc.channel import Dialer
from services.common.rpc.status import from_rpc_error
from services.gateway.engine import codec
from services.gateway.engine.generation import Call, Choice
from services.gateway.engine.metrics import FailoverReason, RequestMetrics
from services.gateway.engine.session import Session, SessionStream, Timings
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc, session_pb2

if TYPE_CHECKING:
    from tokasaurus.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger(__name__)

_NO_WORKER = "NO_WORKER"  # a scheduler's reason to refuse sessions until its worker has loaded the model
_HEALTH_TIMEOUT_S = 10.0  # of one Watch; the session is tried again behind it
_BOOT_S = 10.0  # a scheduler that starts with the gateway listens by then; later its absence is a warning
DRAINING = "draining"  # a scheduler's reason not to be ready: what it has goes on


class Losses(Protocol):
    """Where requests go that a replica cannot go on with: ``Failover``."""

    def lose(self, tokens: dict[Choice, np.ndarray], error: TokaError, reason: FailoverReason) -> None: ...

    def refused(self, call: Call, error: TokaError, by: str) -> None: ...


class Replica:
    """Owned by the ``Fleet``, and the owner of one session at a time; runs on the gateway's event loop. ``run`` is a
    task for the gateway's whole life.

    ``model`` and ``load`` are the last known ones; ``load`` is None while no session is open.
    """

    def __init__(
        self,
        address: str,
        *,
        client_id: str,
        tokenizer_fingerprint: str,
        metrics: RequestMetrics,
        timings: Timings,
        losses: Losses,
        on_change: Callable[[], None],
        dialer: Dialer,
    ) -> None:
        self.address = address
        self.model: codec.ModelFacts | None = None
        self.scheduler_id = ""
        self.load: observe_pb2.Load | None = None
        self.known = asyncio.Event()  # whether it is ready, for the first time
        self._client_id = client_id
        self._fingerprint = tokenizer_fingerprint
        self._metrics = metrics
        self._timings = timings
        self._losses = losses
        self._on_change = on_change
        self._dialer = dialer
        self._session: Session | None = None
        self._stub: SchedulerServiceAsyncStub | None = None
        self._trouble = "not connected yet"
        self._started_at = 0.0
        self._boots = False
        self._stalled_since: float | None = None

    @property
    def ready(self) -> bool:
        """Takes requests now."""
        return self._session is not None and self.load is not None and self.load.ready

    @property
    def can_resume(self) -> bool:
        """Goes on with samples that have tokens of another scheduler's."""
        return self.model is not None and self.model.can_resume

    @property
    def trouble(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.ready:
            return ""
        if self._session is None:
            return self._trouble
        return (self.load.not_ready_reason if self.load is not None else "") or "its worker does not answer yet"

    @property
    def expected(self) -> bool:
        """It was ready once, or answers, and its worker is still to come."""
        return self.model is not None or self._boots

    @property
    def stalled_s(self) -> float:
        """For how long it says that it does not go on with what it has; 0 when it does not say so."""
        return 0.0 if self._stalled_since is None else time.monotonic() - self._stalled_since

    @property
    def backlog(self) -> int:
        """Messages to it that are not written yet."""
        return 0 if self._session is None else self._session.backlog

    @property
    def outstanding_tokens(self) -> int:
        """Work ahead of a new request: as reported, and what was sent since."""
        if self._session is None or self.load is None:
            return 0
        return self.load.outstanding_tokens + self._session.unreported_tokens

    @property
    def stub(self) -> "SchedulerServiceAsyncStub | None":
        """For calls beside the session, on its connection and with ``metadata``; None while there is none."""
        return None if self._session is None else self._stub

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to it says about its caller."""
        return self._dialer.metadata()

    def submit(self, call: Call) -> None:
        """Send ``call``. Raises ``Unavailable`` or ``Overloaded``."""
        if self._session is None:
            raise Unavailable(f"scheduler {self.address} is not available: {self._trouble}")
        self._session.submit(call)

    async def room(self) -> None:
        """Wait while ``backlog`` is large, as long as there is a connection."""
        if self._session is not None:
            await self._session.room()

    def fail_all(self, error: TokaError) -> None:
        """End every request here with ``error``."""
        if self._session is not None:
            for generation in {choice.generation for choice in self._session.abandon()}:
                generation.fail(error)

    def hand_over(self) -> None:
        """It is stalled: what is here goes on elsewhere. But not what was lost before and has had no token since:
        workers may die of it, and one scheduler alone finds that out."""
        if self._session is not None and (tokens := self._session.abandon(all_of_it=False)):
            error = Unavailable(f"the scheduler's worker was lost: {self.trouble}; send the request again")
            self._losses.lose(tokens, error, "worker")

    # From the session.

    def loaded(self, load: observe_pb2.Load) -> None:
        """The scheduler's own view of itself."""
        was_ready, self.load = self.ready, load
        self.known.set()
        if load.ready or load.not_ready_reason == DRAINING:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = time.monotonic()
        if self.ready != was_ready:
            why = {} if self.ready else {"reason": self.trouble}
            log.info("scheduler ready" if self.ready else "scheduler not ready", scheduler=self.address, **why)
            self._on_change()

    def refused(self, call: Call, error: TokaError) -> None:
        """Another replica may take it."""
        self._losses.refused(call, error, self.address)

    def lose(self, tokens: dict[Choice, np.ndarray], error: TokaError) -> None:
        """Another replica may go on with them."""
        self._losses.lose(tokens, error, "refused")

    async def run(self) -> None:
        """Connect, serve, and begin again with growing pauses; ends only by being cancelled, and takes no requests
        then."""
        try:
            await self._connect_again_and_again()
        finally:
            self._trouble = "the gateway is shutting down"
            self._drop_session(Unavailable(f"{self._trouble}; send the request again"), "lost")

    async def _connect_again_and_again(self) -> None:
        pause = self._timings.first_backoff
        self._started_at = time.monotonic()
        while True:
            try:
                async with self._dialer.open_aio(self.address) as channel:  # with the certificates of now
                    await self._serve_sessions(channel)
            except TokaError as error:
                trouble = error
            except Exception as error:
                log.exception("session failed", scheduler=self.address)
                trouble = Unavailable(f"internal error: {type(error).__name__}")
            if self._session is not None or trouble.reason == _NO_WORKER:
                pause = self._timings.first_backoff
            self._lost(trouble)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 2, self._timings.last_backoff)

    async def _serve_sessions(self, channel: grpc.aio.Channel) -> None:
        """Open a session and serve it. While the scheduler has no worker yet, open it again as soon as it has one.
        Always raises the ``TokaError`` that ended the last session."""
        while True:
            try:
                await self._serve_one_session(channel)
            except TokaError as error:
                if error.reason != _NO_WORKER:
                    raise
                self._lost(error)
                if not await self._becomes_ready(channel):
                    raise

    async def _becomes_ready(self, channel: grpc.aio.Channel) -> bool:
        """Wait until the scheduler's health turns to SERVING, for a bounded time. Returns False if it was SERVING
        already or cannot be watched, so that the caller pauses before the next try."""
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the types leave out its methods
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
        was_ready = True
        try:
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return not was_ready
                was_ready = False
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not was_ready
        finally:
            watch.cancel()
        return False

    async def _serve_one_session(self, channel: grpc.aio.Channel) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        stream = self._stub.Session(metadata=self.metadata())
        try:
            opened = await self._open(stream)
            model = codec.decode_model(opened.model)
            self._check(model)
            self.model, self.scheduler_id = model, opened.scheduler_id
            self._session = Session(stream, self._metrics, self, self._timings, takes_submits=model.takes_submits)
            log.info("session open", scheduler=self.address, scheduler_id=self.scheduler_id, model=model.id)
            self._on_change()
            await self._session.run()
        finally:
            stream.cancel()

    async def _open(self, stream: SessionStream) -> session_pb2.SessionOpened:
        try:
            async with asyncio.timeout(self._timings.open_timeout):
                await stream.write(codec.encode_open(self._client_id))
                message: Any = await stream.read()  # a SessionResponse, or the end
        except TimeoutError as error:
            raise Unavailable(f"no answer within {self._timings.open_timeout:.0f} s") from error
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:
            raise Unavailable("the connection ended at once") from error
        if message is grpc.aio.EOF or message is None or message.WhichOneof("payload") != "opened":
            raise Unavailable("it did not open the session")
        opened: session_pb2.SessionOpened = message.opened
        return opened

    def _check(self, model: codec.ModelFacts) -> None:
        major = model.contract_version.partition(".")[0]
        if major != codec.CONTRACT_MAJOR:
            raise FailedPrecondition(
                f"it speaks contract version {model.contract_version!r} and this gateway {codec.CONTRACT_MAJOR}.x;"
                " run the same version of both"
            )
        if model.tokenizer_fingerprint != self._fingerprint:
            raise FailedPrecondition(
                f"its tokenizer (fingerprint {model.tokenizer_fingerprint[:12]}...) is not this gateway's"
                f" ({self._fingerprint[:12]}...); start both with the same model= and tokenizer="
            )

    def _lost(self, error: TokaError) -> None:
        reason = error.message
        if reason != self._trouble or self._session is not None:
            starting = self.model is None and time.monotonic() < self._started_at + _BOOT_S
            write = log.info if starting or error.reason == _NO_WORKER else log.warning
            write("scheduler not available", scheduler=self.address, reason=reason)
        self._trouble, self._boots = reason, error.reason == _NO_WORKER
        lost = Unavailable(f"the scheduler was lost: {reason}; send the request again")
        if error.reason == codec.MESSAGES_LOST:
            self._fail_incomplete(lost)
        self._drop_session(lost, self._kind_of_loss(error))

    def _fail_incomplete(self, error: TokaError) -> None:
        """End the requests that have tokens of this session: tokens between them may be missing."""
        if self._session is not None:
            for generation in self._session.begun():
                generation.fail(error)

    def _kind_of_loss(self, error: TokaError) -> FailoverReason:
        if error.reason == "DRAINING" or (self.load is not None and self.load.not_ready_reason == DRAINING):
            return "drained"
        return "hung" if error.reason == "SCHEDULER_HUNG" else "lost"

    def _drop_session(self, error: TokaError, reason: FailoverReason) -> None:
        session, self._session, self.load, self._stalled_since = self._session, None, None, None
        self.known.set()
        if session is not None:
            self._on_change()
            if tokens := session.abandon():
                self._losses.lose(tokens, error, reason)
