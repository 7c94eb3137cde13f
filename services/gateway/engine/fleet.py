"""All schedulers of this gateway: the models they serve, their readiness, and the choice of one for each request."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeVar

import structlog

from services.common.boundaries import undo_on_error
from services.common.errors import Internal, NotFound, TokaError, Unavailable
from services.common.process.time_slice import TimeSlice
from services.common.request_ids import is_chosen
from services.common.rpc.channel import PLAIN, Dialer
from services.gateway.engine.active_request import ActiveRequest, SchedulerRequest
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.failover import Failover
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.replica import Replica
from services.gateway.engine.request import PromptRequest
from services.gateway.engine.routing import PrefixRouter
from services.gateway.engine.session import MAX_BACKLOG, Timings

log = structlog.get_logger(__name__)

Found = TypeVar("Found")
_POLL_S = 0.5  # interval of checks on stalled replicas
_INLINE_PROMPTS = 256  # sent in a few milliseconds without a pause


class Fleet:
    """The replicas of a gateway. Runs on the gateway's event loop, between ``start`` and ``stop``."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        tokenizer_fingerprint: str,
        metrics: RequestMetrics,
        timings: Timings,
        dialer: Dialer = PLAIN,
        turn: int | None = None,
        strict_names: bool = False,
    ) -> None:
        """Create the fleet.

        ``turn`` is the index of the first replica to use, see ``PrefixRouter``. With ``strict_names``, requests for an
        unknown model are rejected even if a single model is served.
        """
        self.draining = False
        self.updating = asyncio.Lock()  # held while the weights of all replicas are replaced
        self._timings = timings
        self._strict_names = strict_names
        self._router = PrefixRouter(turn)
        self._failover = Failover(self._choose_for_retry, metrics, timings.failover)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        client_id = f"gateway-{socket.gethostname()}-{os.getpid()}"
        self.replicas = [
            Replica(
                address,
                client_id=client_id,
                tokenizer_fingerprint=tokenizer_fingerprint,
                metrics=metrics,
                timings=timings,
                loss_handler=self._failover,
                on_change=self._on_change,
                dialer=dialer,
            )
            for address in dict.fromkeys(addresses)
        ]

    def start(self) -> None:
        """Start to connect. Schedulers may start later."""
        self._tasks = [asyncio.create_task(replica.run(), name=replica.address) for replica in self.replicas]
        self._tasks += [
            asyncio.create_task(self._failover.run(), name="failover"),
            asyncio.create_task(self._move_from_stalled(), name="move from stalled"),
        ]

    async def watch_tasks(self) -> None:
        """Wait until a background task ends, which is a defect. Fail all requests and raise ``Internal``.

        Requests would otherwise wait for the task forever. The caller should end the process.
        """
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            cause = None if task.cancelled() else task.exception()
            log.error("a task that all requests need has ended", task=task.get_name(), exc_info=cause)
        self.fail_all(Unavailable("the gateway cannot go on; send the request again"))
        raise Internal("a task that all requests need has ended")

    async def wait_known(self, timeout_s: float) -> None:
        """Wait until the state of every scheduler is known, for at most ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for replica in self.replicas:
                    await replica.state_known.wait()

    async def stop(self) -> None:
        """End every request and session."""
        self.fail_all(Unavailable("the gateway is shutting down; send the request again"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail_all(self, error: TokaError) -> None:
        """Fail all requests, and all later ones, with ``error``."""
        self._failover.fail_all(error)
        for replica in self.replicas:
            replica.fail_all(error)
        self._on_change()

    @contextlib.contextmanager
    def aborting(self, request_ids: Collection[str] | None) -> Iterator[int]:
        """End the requests that no scheduler has accepted, while the block ends the others at the schedulers.

        Queued requests end at once, with the tokens that they have. Yields the number of their samples.
        Requests on their way to a scheduler end when it has accepted them. ``request_ids`` is as for ``is_chosen``.
        """
        sent = [each for replica in self.replicas for each in replica.unaccepted]
        chosen = [each for each in sent if is_chosen(each.submission.request_id, request_ids)]
        try:
            yield self._failover.abort(request_ids)
        finally:
            for request in chosen:
                if request.holder is not None:
                    request.holder.act_on(request, "end")

    def cancel_queued(self, request_id: str) -> int:
        """Cancel a request that no scheduler has, for an operator. Return the number of its samples."""
        return self._failover.cancel(request_id)

    @property
    def trouble(self) -> str:
        """The reason why no scheduler is ready, or an empty string if one is."""
        if self.draining:
            return "the gateway is shutting down"
        if any(replica.ready for replica in self.replicas):
            return ""
        return "; ".join(f"scheduler {replica.address}: {replica.trouble}" for replica in self.replicas)

    @property
    def models(self) -> dict[str, ModelFacts]:
        """All known models by id. Models of lost schedulers are included, since those are expected to return."""
        return {replica.model.id: replica.model for replica in self.replicas if replica.model is not None}

    async def list_models(self) -> list[ModelFacts]:
        """Return all models, once one is known. Raises ``Unavailable`` after a timeout.

        Gateways that share a port find their schedulers at different times. The wait hides this from clients.
        """
        return await self._wait_for(lambda: list(self.models.values()))

    async def model(self, name: str | None) -> ModelFacts:
        """Return the model ``name`` once it is known. If failover is disabled, wait until a scheduler is ready for it.

        An empty ``name`` means the only model. So does an unknown name if a single model is served and names are not
        strict. Raises ``NotFound`` for any other unknown name, and ``Unavailable`` after a timeout.
        """

        def ready() -> ModelFacts | None:
            facts = self._look_up(name) if self.models else None
            return facts if facts is not None and (self._failover.enabled or self._ready(facts.id)) else None

        return await self._wait_for(ready)

    async def _wait_for(self, find: Callable[[], Found | None]) -> Found:
        """Return the result of ``find`` as soon as it is not empty. Raises ``Unavailable`` after a timeout.

        The timeout is that of failover if a scheduler is expected to become ready. It is shorter if none was ever
        seen, so that the client can try another gateway.
        """
        began_at = time.monotonic()
        while not (found := find()):
            self._check_open()
            changed, timeout_s = self._changed, self._timings.wait_for_ready
            if any(replica.expected for replica in self.replicas):
                timeout_s = max(timeout_s, self._timings.failover)
            try:
                async with asyncio.timeout(began_at + timeout_s - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                raise self._none_ready() from None
        return found

    def _check_open(self) -> None:
        if (error := self._failover.closed_with) is not None:
            raise error

    def _none_ready(self) -> Unavailable:
        return Unavailable(f"no scheduler is ready: {self.trouble or 'try again'}")

    async def generate(self, prompts: Sequence[PromptRequest], *, streaming: bool) -> ActiveRequest:
        """Send each of ``prompts`` to a replica. Queue it if none is ready.

        While a long list is sent, other tasks run, and the list waits for replicas with a large backlog. The caller
        closes the returned request. Raises ``TokaError``.
        """
        self._check_open()
        many = len(prompts) > _INLINE_PROMPTS
        make = partial(ActiveRequest, prompts, streaming=streaming)
        active = await asyncio.to_thread(make) if many else make()
        time_slice = TimeSlice()
        with undo_on_error(active.close):
            for request in active.scheduler_requests:
                if many and time_slice.is_over:
                    await time_slice.renew()
                    self._check_open()
                    active.check()
                await self._send(request, waits=many)
        return active

    async def _send(self, request: SchedulerRequest, *, waits: bool) -> None:
        """Send ``request``. If ``waits``, wait until its replica has a small backlog."""
        while ready := self._ready(request.submission.prompt.model):
            replica = self._choose(request, ready)
            if not waits or replica.backlog <= MAX_BACKLOG:
                replica.submit(request)
                return
            await replica.room()
            self._check_open()
        self._failover.enqueue(request, self._none_ready())

    def _choose(self, request: SchedulerRequest, ready: Sequence[Replica]) -> Replica:
        """Return the replica for ``request``. Failover sends all samples of a prompt to one replica, if it is ready.

        A request whose stragglers end or are parked goes to a replica that can do it, if one is ready.
        """
        prompt, placed = request.submission.prompt, request.parent.failover_replicas
        if prompt.settings.end_after is not None or prompt.settings.park_after is not None:
            ready = [replica for replica in ready if replica.controls_stragglers] or ready
        prompt_index = request.samples[0].prompt_index
        if request.attempt and (address := placed.get(prompt_index)) is not None:
            for replica in ready:
                if replica.address == address:
                    return replica
        chosen = self._router.choose(ready, prompt.prompt_ids, prompt.settings.cache_salt)
        if request.attempt:
            placed[prompt_index] = chosen.address
        return chosen

    def _choose_for_retry(self, request: SchedulerRequest, avoid: str | None) -> Replica | None:
        """Return the replica for a queued ``request``, or None if none can take it.

        The replica at the address ``avoid`` is chosen only if there is no other one.
        """
        ready = [
            replica
            for replica in self._ready(request.submission.prompt.model)
            if replica.backlog <= MAX_BACKLOG and (replica.can_resume or not request.submission.resumes)
        ]
        if avoid is not None:
            ready = [replica for replica in ready if replica.address != avoid] or ready
        return self._choose(request, ready) if ready else None

    async def _move_from_stalled(self) -> None:
        """Move requests from stalled replicas to ready ones."""
        while True:
            stalled = [replica for replica in self.replicas if replica.stalled_s]
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if stalled else None):
                    await changed.wait()
            for replica in stalled:
                if replica.stalled_s < self._timings.move_after or replica.model is None:
                    continue
                if self._ready(replica.model.id):
                    replica.move_requests()

    def find_model(self, name: str) -> ModelFacts | None:
        """Return the model that has ``name`` as its id or as an alias, or None."""
        known = self.models
        return known.get(name) or next((facts for facts in known.values() if name in facts.aliases), None)

    def _look_up(self, name: str | None) -> ModelFacts:
        if name and (facts := self.find_model(name)) is not None:
            return facts
        known = self.models
        if len(known) == 1 and not (name and self._strict_names):
            return next(iter(known.values()))
        served = ", ".join(sorted(known))
        problem = f"the model {name[:200]!r} does not exist" if name else "name a model"
        raise NotFound(f"{problem}; this server has {served}", field="model", reason="MODEL_NOT_FOUND")

    def _ready(self, model: str) -> list[Replica]:
        return [r for r in self.replicas if r.ready and r.model is not None and r.model.id == model]

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._failover.wake()
