"""What has no scheduler waits here until one takes it: what lost its own goes on from the tokens that it has."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.common.errors import Internal, Overloaded, TokaError, Unavailable
from services.common.process.time_slice import TimeSlice
from services.gateway.engine.generation import Call, Choice
from services.gateway.engine.metrics import FailoverReason, RequestMetrics
from services.gateway.engine.replica import Replica
from services.gateway.engine.trial import PROVEN, Trial

log = structlog.get_logger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0  # before one that was refused is sent again
_LOOK_S = 0.1  # between two looks at what waits
_MOST_NEW = 16_384  # requests, before another one that is new has to come back later


@dataclass
class _Wait:
    """A call's time without a scheduler, until one accepts it. Times are of ``time.monotonic``."""

    reason: FailoverReason | None  # None: it had no scheduler before
    error: TokaError  # what the caller hears when nothing comes of it
    give_up_at: float
    not_before: float = 0.0
    pause: float = _FIRST_PAUSE_S
    refused_by: str | None = None  # the address


class Failover:
    """Owned by the ``Fleet``; runs on the gateway's event loop. ``run`` is a task for the gateway's whole life.

    ``choose(call, address)`` gives the replica for a call, rather not the one at ``address``; None while none can take
    it.
    """

    def __init__(
        self,
        choose: Callable[[Call, str | None], Replica | None],
        metrics: RequestMetrics,
        patience_s: float,
    ) -> None:
        self._choose = choose
        self._metrics = metrics
        self._patience_s = patience_s
        self._waits: WeakKeyDictionary[Call, _Wait] = WeakKeyDictionary()
        self._here: dict[Call, None] = {}  # queued calls
        self._trial = Trial()
        self._news = asyncio.Event()
        self.closed_with: TokaError | None = None

    @property
    def on(self) -> bool:
        """Whether anything is waited for."""
        return self._patience_s > 0

    def wake(self) -> None:
        """Look for a replica again, since one may have become ready."""
        self._news.set()

    def begin(self, call: Call, error: TokaError) -> None:
        """There is no scheduler for ``call``, which is new. Raises ``TokaError``: ``error`` when it is not to wait."""
        if not self.on:
            raise error
        if len(self._here) >= _MOST_NEW:
            raise Overloaded(f"{len(self._here)} requests wait for a scheduler; {error.message}", retry_after_s=1.0)
        self._waits[call] = _Wait(None, error, time.monotonic() + self._patience_s)
        self._take(call)

    def lose(self, tokens: Mapping[Choice, np.ndarray], error: TokaError, reason: FailoverReason) -> None:
        """Choices, and what came of them since they were sent, are at no scheduler any more, for ``error``."""
        generations = dict.fromkeys(choice.generation for choice in tokens)
        if self.closed_with is not None or not self.on:
            for generation in generations:
                generation.fail(self.closed_with or error)
            return
        if reason == "worker":
            for choice in tokens:
                choice.setbacks += 1
        elif reason != "drained":  # who drains dies of nothing
            for choice in self._trial.lost(tokens):
                choice.generation.fail(_found_out(choice, error))
        for generation in generations:
            try:
                for call in generation.lost(tokens):
                    self._waits[call] = _Wait(reason, error, time.monotonic() + self._patience_s)
                    self._take(call)
            except Exception as trouble:  # one request's is not the others'
                generation.break_off("a request could not go on elsewhere", trouble)
        if generations:
            log.warning("requests go on elsewhere", samples=len(tokens), cause=reason)

    def refused(self, call: Call, error: TokaError, by: str) -> None:
        """The scheduler at the address ``by`` rejected ``call``. What none can take ends; a full queue refuses only
        what never was in one."""
        again = isinstance(error, Unavailable) or (isinstance(error, Overloaded) and call.accepted)
        if self.closed_with is not None or not self.on or not again:
            call.generation.fail(self.closed_with or error)
            return
        now = time.monotonic()
        wait = self._waits.setdefault(call, _Wait("refused", error, now + self._patience_s))
        least = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        wait.not_before = now + min(max(least, wait.pause), _LAST_PAUSE_S) * random.uniform(0.5, 1.0)
        wait.pause = min(2 * wait.pause, _LAST_PAUSE_S)
        wait.error, wait.refused_by = error, by
        self._take(call)

    def fail_all(self, error: TokaError) -> None:
        """End all queued calls with ``error``, and from now on every call that is lost."""
        self.closed_with = error
        for call in list(self._here):
            call.generation.fail(error)
        self._here.clear()

    def cancel(self, call: Call) -> None:
        """Remove ``call`` from the queue."""
        self._here.pop(call, None)

    def count_tokens(self, call: Call) -> int:
        """Return 0, since a queued call receives no tokens."""
        return 0

    async def run(self) -> None:
        """Send queued calls until the task is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self._here or self._trial.busy else None):
                    await self._news.wait()
            self._news.clear()
            self._trial.let_go(time.monotonic())
            time_slice = TimeSlice()
            for call in list(self._here):
                if time_slice.is_over:
                    await time_slice.renew()
                if call in self._here:
                    self._try(call)

    def _take(self, call: Call) -> None:
        self._trial.forget(call)
        call.holder = self
        self._here[call] = None
        self._news.set()

    def _try(self, call: Call) -> None:
        """Send ``call`` if a replica can take it now. Fail it if its time is over."""
        wait, now = self._waits[call], time.monotonic()
        try:
            if now >= wait.give_up_at:
                raise wait.error
            if now < wait.not_before or not self._trial.admits(call):
                return
            replica = self._choose(call, wait.refused_by)
            if replica is None:
                return
            with contextlib.suppress(Overloaded, Unavailable):  # it has changed its mind
                replica.submit(call)
                self._sent(call, wait, now)
                del self._here[call]
        except TokaError as error:
            self._end(call, error)
        except Exception as error:  # one request's trouble is not the others'
            self._here.pop(call, None)
            call.generation.break_off("a request could not be sent", error)

    def _sent(self, call: Call, wait: _Wait, now: float) -> None:
        self._trial.sent(call, now)
        for choice in call.choices:
            choice.late_s = time.perf_counter() - call.generation.began_at
        if wait.reason is not None:
            self._metrics.count_failovers(wait.reason, len(call.choices))

    def _end(self, call: Call, error: TokaError) -> None:
        self._here.pop(call, None)
        call.generation.fail(error)


def _found_out(choice: Choice, error: TokaError) -> Internal:
    return Internal(
        f"{choice.setbacks} schedulers in a row were lost with this request and without a new token of it, {PROVEN} of"
        f" them with no other suspect: it is not sent again ({error.message})",
        reason="SCHEDULERS_LOST",
    )
