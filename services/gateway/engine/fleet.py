"""All schedulers of this gateway: which models they serve, whether any is ready, and which gets a request."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from services.common.errors import Internal, NotFound, TokaError, Unavailable
from services.common.process.time_slice import TimeSlice
from services.common.rpc.channel import PLAIN, Dialer
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.failover import Failover
from services.gateway.engine.generation import Call, Generation
from services.gateway.engine.job import Job
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.replica import Replica
from services.gateway.engine.routing import PrefixRouter
from services.gateway.engine.session import MOST_BACKLOG, Timings

log = structlog.get_logger(__name__)

Found = TypeVar("Found")
_LOOK_S = 0.5  # between two looks at a replica that does not go on
_FEW_JOBS = 256  # of one request, which are sent in a few milliseconds


class Fleet:
    """Runs on the gateway's event loop, between ``start`` and ``stop``."""

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
        """``strict_names``: a name that no model has is refused even if a single model is served."""
        self.draining = False
        self._timings = timings
        self._strict_names = strict_names
        self._router = PrefixRouter(turn)
        self._failover = Failover(self._choose_again, metrics, timings.failover)
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
                losses=self._failover,
                on_change=self._on_change,
                dialer=dialer,
            )
            for address in dict.fromkeys(addresses)
        ]

    def start(self) -> None:
        """Begin to connect; no scheduler has to be up."""
        self._tasks = [asyncio.create_task(replica.run(), name=replica.address) for replica in self.replicas]
        self._tasks += [
            asyncio.create_task(self._failover.run(), name="failover"),
            asyncio.create_task(self._unload_stalled(), name="unload stalled"),
        ]

    async def goes_on(self) -> None:
        """For as long as all its tasks do, which never end by themselves. Raises ``Internal`` when one has: requests
        would wait for ever for what it did, so every one ends, and the process should."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            cause = None if task.cancelled() else task.exception()
            log.error("a task that all requests need has ended", task=task.get_name(), exc_info=cause)
        self.fail_all(Unavailable("the gateway cannot go on; send the request again"))
        raise Internal("a task that all requests need has ended")

    async def known(self, patience_s: float) -> None:
        """Until each scheduler was found ready, or not ready, once; for ``patience_s`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for replica in self.replicas:
                    await replica.known.wait()

    async def stop(self) -> None:
        """End every request and session."""
        self.fail_all(Unavailable("the gateway is shutting down; send the request again"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail_all(self, error: TokaError) -> None:
        """End every request with ``error``, and from now on new ones, too."""
        self._failover.fail_all(error)
        for replica in self.replicas:
            replica.fail_all(error)
        self._on_change()

    @property
    def trouble(self) -> str:
        """Why no request can be served now; empty when one can."""
        if self.draining:
            return "the gateway is shutting down"
        if any(replica.ready for replica in self.replicas):
            return ""
        return "; ".join(f"scheduler {replica.address}: {replica.trouble}" for replica in self.replicas)

    @property
    def models(self) -> dict[str, ModelFacts]:
        """Every model known so far by id, those of lost schedulers too: they are expected back."""
        return {replica.model.id: replica.model for replica in self.replicas if replica.model is not None}

    async def listed(self) -> list[ModelFacts]:
        """Every model, once one is known: of several gateways that share a port, a client may have asked the one that
        found its scheduler last. Waits a bounded time; then raises ``Unavailable``."""
        return await self._once(lambda: list(self.models.values()))

    async def model(self, name: str | None) -> ModelFacts:
        """Return the model ``name`` (None or empty: the only one) once a scheduler was ready for it; without failover,
        once one is.

        Waits a bounded time for one; then raises ``Unavailable``. Raises ``NotFound`` for a name that no model has,
        unless a single model is served and names are not strict: that model is meant then.
        """

        def ready() -> ModelFacts | None:
            facts = self._look_up(known, name) if (known := self.models) else None
            return facts if facts is not None and (self._failover.on or self._ready(facts.id)) else None

        return await self._once(ready)

    async def _once(self, find: Callable[[], Found | None]) -> Found:
        """What ``find`` gives, as soon as it gives something. A scheduler that is on its way is waited for as others
        are that lost theirs; where there never was one, whoever asks should soon ask somebody else."""
        began_at = time.monotonic()
        while not (found := find()):
            self._check_open()
            changed, patience_s = self._changed, self._timings.wait_for_ready
            if any(replica.expected for replica in self.replicas):
                patience_s = max(patience_s, self._timings.failover)
            try:
                async with asyncio.timeout(began_at + patience_s - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                raise self._nobody() from None
        return found

    def _check_open(self) -> None:
        if (error := self._failover.closed_with) is not None:
            raise error

    def _nobody(self) -> Unavailable:
        return Unavailable(f"no scheduler is ready: {self.trouble or 'try again'}")

    async def generate(self, jobs: Sequence[Job], *, streaming: bool) -> Generation:
        """Send each of ``jobs`` to the replica that suits it, or to the first one that will be ready.

        Other tasks run while a long list is sent, and the list waits while a scheduler is sent many requests. The
        caller closes the generation. Raises ``TokaError``.
        """
        self._check_open()
        many = len(jobs) > _FEW_JOBS
        make = partial(Generation, jobs, streaming=streaming)
        generation = await asyncio.to_thread(make) if many else make()
        time_slice = TimeSlice()
        try:
            for call in generation.calls:
                if many and time_slice.is_over:
                    await time_slice.renew()
                    self._check_open()
                    generation.check()
                await self._send(call, waits=many)
        except BaseException:
            generation.close()
            raise
        return generation

    async def _send(self, call: Call, *, waits: bool) -> None:
        """Send ``call``; if it ``waits``, once its replica has room."""
        while ready := self._ready(call.part.job.model):
            replica = self._choose(call, ready)
            if not waits or replica.backlog <= MOST_BACKLOG:
                replica.submit(call)
                return
            await replica.room()
            self._check_open()
        self._failover.begin(call, self._nobody())

    def _choose(self, call: Call, ready: Sequence[Replica]) -> Replica:
        return self._router.choose(ready, call.part.job.prompt_ids, call.part.job.settings.cache_salt)

    def _choose_again(self, call: Call, not_this: str | None) -> Replica | None:
        """Who gets ``call``, which waited; the replica at the address ``not_this`` only when there is no other. None
        while nobody can take it."""
        ready = [
            replica
            for replica in self._ready(call.part.job.model)
            if replica.backlog <= MOST_BACKLOG and (replica.can_resume or not call.part.resumes)
        ]
        if not_this is not None:
            ready = [replica for replica in ready if replica.address != not_this] or ready
        return self._choose(call, ready) if ready else None

    async def _unload_stalled(self) -> None:
        """What is at a replica that does not go on, while another is ready, goes on there."""
        while True:
            stalled = [replica for replica in self.replicas if replica.stalled_s]
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if stalled else None):
                    await changed.wait()
            for replica in stalled:
                if replica.stalled_s < self._timings.move_after or replica.model is None:
                    continue
                if self._ready(replica.model.id):
                    replica.hand_over()

    def named(self, name: str) -> ModelFacts | None:
        """Return the model that has ``name`` as its id or as an alias, or None."""
        return _named(self.models, name)

    def _look_up(self, known: dict[str, ModelFacts], name: str | None) -> ModelFacts:
        if name and (facts := _named(known, name)) is not None:
            return facts
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


def _named(known: dict[str, ModelFacts], name: str) -> ModelFacts | None:
    if name in known:
        return known[name]
    return next((facts for facts in known.values() if name in facts.aliases), None)
