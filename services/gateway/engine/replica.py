"""Connection of a gateway to one scheduler: its sessions, model, load and readiness."""

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
from services.gateway.engine.active_request import ActiveSample, SchedulerRequest
from services.gateway.engine.metrics import FailoverReason, RequestMetrics
from services.gateway.engine.session import Session, SessionStream, Timings
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc, session_pb2

if TYPE_CHECKING:
    from tokasaurus.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger(__name__)

_NO_WORKER = "NO_WORKER"  # error reason of a scheduler whose worker has not loaded the model yet
_HEALTH_TIMEOUT_S = 10.0  # of one Watch call. The session is opened again after it.
_BOOT_S = 10.0  # a missing scheduler is logged as a warning only after this time, since both may start together
DRAINING = "draining"  # not-ready reason of a scheduler that finishes its requests and accepts no others


class LossHandler(Protocol):
    """Receiver of samples and requests that a replica cannot continue. Implemented by ``Failover``."""

    def lose(self, tokens: dict[ActiveSample, np.ndarray], error: TokaError, reason: FailoverReason) -> None: ...

    def refused(self, request: SchedulerRequest, error: TokaError, by: str) -> None: ...


class Replica:
    """A scheduler, and the session to it. Owned by the ``Fleet``, on the gateway's event loop.

    ``run`` is a task that runs as long as the gateway. ``model`` and ``load`` are the latest known values. ``load`` is
    None while no session is open.
    """

    def __init__(
        self,
        address: str,
        *,
        client_id: str,
        tokenizer_fingerprint: str,
        metrics: RequestMetrics,
        timings: Timings,
        loss_handler: LossHandler,
        on_change: Callable[[], None],
        dialer: Dialer,
    ) -> None:
        self.address = address
        self.model: codec.ModelFacts | None = None
        self.scheduler_id = ""
        self.load: observe_pb2.Load | None = None
        self.state_known = asyncio.Event()  # set when it is first known whether the replica is ready
        self._client_id = client_id
        self._fingerprint = tokenizer_fingerprint
        self._metrics = metrics
        self._timings = timings
        self._loss_handler = loss_handler
        self._on_change = on_change
        self._dialer = dialer
        self._session: Session | None = None
        self._stub: SchedulerServiceAsyncStub | None = None
        self._trouble = "not connected yet"
        self._started_at = 0.0
        self._booting = False
        self._stalled_since: float | None = None

    @property
    def ready(self) -> bool:
        """True if the replica accepts requests."""
        return self._session is not None and self.load is not None and self.load.ready

    @property
    def can_resume(self) -> bool:
        """True if the replica can continue samples of another scheduler."""
        return self.model is not None and self.model.can_resume

    @property
    def controls_stragglers(self) -> bool:
        """True if the replica can end and park samples of a group."""
        return self.model is not None and self.model.stragglers

    @property
    def trouble(self) -> str:
        """The reason why the replica is not ready, or an empty string if it is."""
        if self.ready:
            return ""
        if self._session is None:
            return self._trouble
        return (self.load.not_ready_reason if self.load is not None else "") or "its worker does not answer yet"

    @property
    def expected(self) -> bool:
        """True if the replica was connected before, or its scheduler waits for a worker."""
        return self.model is not None or self._booting

    @property
    def stalled_s(self) -> float:
        """Seconds since the scheduler reported that it cannot continue its requests, or 0 if it can."""
        return 0.0 if self._stalled_since is None else time.monotonic() - self._stalled_since

    @property
    def backlog(self) -> int:
        """Number of messages to the scheduler that are not written yet."""
        return 0 if self._session is None else self._session.backlog

    @property
    def unaccepted(self) -> list[SchedulerRequest]:
        """Requests that were sent, and that the scheduler has neither accepted nor rejected."""
        return [] if self._session is None else list(self._session.unaccepted.values())

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of work ahead of a new request: the reported ones, and those submitted since the report."""
        if self._session is None or self.load is None:
            return 0
        return self.load.outstanding_tokens + self._session.unreported_tokens

    @property
    def stub(self) -> "SchedulerServiceAsyncStub | None":
        """Stub for RPCs beside the session, to call with ``metadata()``. None while no session is open."""
        return None if self._session is None else self._stub

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the gRPC metadata that authenticates the gateway."""
        return self._dialer.metadata()

    def submit(self, request: SchedulerRequest) -> None:
        """Send ``request``. Raises ``Unavailable`` or ``Overloaded``."""
        if self._session is None:
            raise Unavailable(f"scheduler {self.address} is not available: {self._trouble}")
        self._session.submit(request)

    async def room(self) -> None:
        """Wait while ``backlog`` is large and a session is open."""
        if self._session is not None:
            await self._session.room()

    def fail_all(self, error: TokaError) -> None:
        """Fail every request of this replica with ``error``."""
        if self._session is not None:
            for active in {sample.request for sample in self._session.abandon()}:
                active.fail(error)

    def move_requests(self) -> None:
        """Move requests of this stalled replica to others.

        Samples that were lost before and have no token since stay: they may crash workers, and the scheduler that
        keeps them finds out.
        """
        if self._session is not None and (tokens := self._session.abandon(include_lost=False)):
            error = Unavailable(f"the scheduler's worker was lost: {self.trouble}; send the request again")
            self._loss_handler.lose(tokens, error, "worker")

    # From the session.

    def loaded(self, load: observe_pb2.Load) -> None:
        """Record the load that the scheduler reported."""
        was_ready, self.load = self.ready, load
        self.state_known.set()
        if load.ready or load.not_ready_reason == DRAINING:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = time.monotonic()
        if self.ready != was_ready:
            why = {} if self.ready else {"reason": self.trouble}
            log.info("scheduler ready" if self.ready else "scheduler not ready", scheduler=self.address, **why)
            self._on_change()

    def refused(self, request: SchedulerRequest, error: TokaError) -> None:
        """Queue the refused ``request`` for another replica."""
        self._loss_handler.refused(request, error, self.address)

    def lose(self, tokens: dict[ActiveSample, np.ndarray], error: TokaError) -> None:
        """Queue samples that the scheduler gave up for another replica."""
        self._loss_handler.lose(tokens, error, "refused")

    async def run(self) -> None:
        """Keep a session open, with growing pauses between attempts, until the task is cancelled."""
        try:
            await self._reconnect_forever()
        finally:
            self._trouble = "the gateway is shutting down"
            self._drop_session(Unavailable(f"{self._trouble}; send the request again"), "lost")

    async def _reconnect_forever(self) -> None:
        pause = self._timings.first_backoff
        self._started_at = time.monotonic()
        while True:
            try:
                async with self._dialer.open_aio(self.address) as channel:  # reads the current certificates
                    await self._serve_sessions(channel)
            except TokaError as error:
                trouble = error
            except Exception as error:
                log.exception("session failed", scheduler=self.address)
                trouble = Unavailable(f"internal error: {type(error).__name__}")
            if self._session is not None or trouble.reason == _NO_WORKER:
                pause = self._timings.first_backoff
            self._disconnected(trouble)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 2, self._timings.last_backoff)

    async def _serve_sessions(self, channel: grpc.aio.Channel) -> None:
        """Serve sessions until one ends. Raises the ``TokaError`` that ended it.

        While the scheduler has no worker, wait for one and open the session again.
        """
        while True:
            try:
                await self._serve_one_session(channel)
            except TokaError as error:
                if error.reason != _NO_WORKER:
                    raise
                self._disconnected(error)
                if not await self._wait_serving(channel):
                    raise

    async def _wait_serving(self, channel: grpc.aio.Channel) -> bool:
        """Wait for a bounded time until the scheduler's health changes to SERVING.

        Return False if it was SERVING already or cannot be watched. The caller then pauses before the next attempt.
        """
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
            self._session = Session(
                stream,
                self._metrics,
                self,
                self._timings,
                takes_submits=model.takes_submits,
                controls_stragglers=model.stragglers,
            )
            log.info("session open", scheduler=self.address, scheduler_id=self.scheduler_id, model=model.id)
            self._on_change()
            await self._session.run()
        finally:
            stream.cancel()

    async def _open(self, stream: SessionStream) -> session_pb2.SessionOpened:
        try:
            async with asyncio.timeout(self._timings.open_timeout):
                await stream.write(codec.encode_open(self._client_id))
                message: Any = await stream.read()  # a SessionResponse, or EOF
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

    def _disconnected(self, error: TokaError) -> None:
        reason = error.message
        if reason != self._trouble or self._session is not None:
            starting = self.model is None and time.monotonic() < self._started_at + _BOOT_S
            write = log.info if starting or error.reason == _NO_WORKER else log.warning
            write("scheduler not available", scheduler=self.address, reason=reason)
        self._trouble, self._booting = reason, error.reason == _NO_WORKER
        lost = Unavailable(f"the scheduler was lost: {reason}; send the request again")
        if error.reason == codec.MESSAGES_LOST:
            self._fail_incomplete(lost)
        self._drop_session(lost, self._loss_reason(error))

    def _fail_incomplete(self, error: TokaError) -> None:
        """Fail the requests that have tokens of this session, since tokens may be missing."""
        if self._session is not None:
            for active in self._session.begun():
                active.fail(error)

    def _loss_reason(self, error: TokaError) -> FailoverReason:
        if error.reason == "DRAINING" or (self.load is not None and self.load.not_ready_reason == DRAINING):
            return "drained"
        return "hung" if error.reason == "SCHEDULER_HUNG" else "lost"

    def _drop_session(self, error: TokaError, reason: FailoverReason) -> None:
        session, self._session, self.load, self._stalled_since = self._session, None, None, None
        self.state_known.set()
        if session is not None:
            self._on_change()
            if tokens := session.abandon():
                self._loss_handler.lose(tokens, error, reason)
