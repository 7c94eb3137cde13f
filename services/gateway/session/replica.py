"""One scheduler as this gateway knows it: connected again and again, with its model, its load, and why not ready."""

import asyncio
import random
from collections.abc import Callable

import grpc
import structlog

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.rpc.channel import CHANNEL_OPTIONS
from services.common.rpc.status import from_rpc_error
from services.gateway.generation import Call
from services.gateway.metrics import RequestMetrics
from services.gateway.session import codec
from services.gateway.session.client import Session, Timings
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

log = structlog.get_logger(__name__)


class Replica:
    """Owned by the ``Fleet``; runs on the gateway's event loop. ``run`` is a task for the gateway's whole life.

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
        on_change: Callable[[], None],
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
        self._on_change = on_change
        self._session: Session | None = None
        self._trouble = "not connected yet"

    @property
    def ready(self) -> bool:
        """Takes requests now."""
        return self._session is not None and self.load is not None and self.load.ready

    @property
    def trouble(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.ready:
            return ""
        return self._trouble if self._session is None else "its worker does not answer yet"

    @property
    def outstanding_tokens(self) -> int:
        """Work ahead of a new request: as reported, and what was sent since."""
        if self._session is None or self.load is None:
            return 0
        return self.load.outstanding_tokens + self._session.unreported_tokens

    def submit(self, call: Call) -> None:
        """Send ``call``. Raises ``Unavailable`` or ``Overloaded``."""
        if self._session is None:
            raise Unavailable(f"scheduler {self.address} is not available: {self._trouble}")
        self._session.submit(call)

    def fail_all(self, error: TokaError) -> None:
        """End every request here with ``error``."""
        if self._session is not None:
            self._session.fail_all(error)

    async def run(self) -> None:
        """Connect, serve, and begin again with growing pauses; ends only by being cancelled, and takes no requests
        then."""
        try:
            await self._connect_again_and_again()
        finally:
            self._trouble = "the gateway is shutting down"
            self._drop_session(Unavailable(f"{self._trouble}; send the request again"))

    async def _connect_again_and_again(self) -> None:
        pause = self._timings.first_backoff
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            while True:
                try:
                    await self._serve_one_session(channel)
                except TokaError as error:
                    reason = error.message
                except Exception as error:
                    log.exception("session failed", scheduler=self.address)
                    reason = f"internal error: {type(error).__name__}"
                if self._session is not None:
                    pause = self._timings.first_backoff
                self._lost(reason)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, self._timings.last_backoff)

    async def _serve_one_session(self, channel: grpc.aio.Channel) -> None:
        stream = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
        try:
            opened = await self._open(stream)
            model = codec.decode_model(opened.model)
            self._check(model)
            self.model, self.scheduler_id = model, opened.scheduler_id
            self._session = Session(stream, self._metrics, self._loaded, self._timings)
            log.info("session open", scheduler=self.address, scheduler_id=self.scheduler_id, model=model.id)
            self._on_change()
            await self._session.run()
        finally:
            stream.cancel()

    async def _open(self, stream: grpc.aio.StreamStreamCall):
        try:
            async with asyncio.timeout(self._timings.open_timeout):
                await stream.write(codec.encode_open(self._client_id))
                message = await stream.read()
        except TimeoutError as error:
            raise Unavailable(f"no answer within {self._timings.open_timeout:.0f} s") from error
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:
            raise Unavailable("the connection ended at once") from error
        if message is grpc.aio.EOF or message.WhichOneof("payload") != "opened":
            raise Unavailable("it did not open the session")
        return message.opened

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

    def _loaded(self, load: observe_pb2.Load) -> None:
        was_ready, self.load = self.ready, load
        self.known.set()
        if self.ready != was_ready:
            log.info("scheduler ready" if self.ready else "scheduler not ready", scheduler=self.address)
            self._on_change()

    def _lost(self, reason: str) -> None:
        if reason != self._trouble or self._session is not None:
            log.warning("scheduler not available", scheduler=self.address, reason=reason)
        self._trouble = reason
        self._drop_session(Unavailable(f"the scheduler was lost: {reason}; send the request again"))

    def _drop_session(self, error: TokaError) -> None:
        session, self._session, self.load = self._session, None, None
        self.known.set()
        if session is not None:
            session.fail_all(error)
            self._on_change()
