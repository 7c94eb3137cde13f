"""The queue of requests without a scheduler: new ones, and those whose scheduler was lost or refused them."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.common.boundaries import errors_to
from services.common.errors import Cancelled, Internal, Overloaded, TokaError, Unavailable
from services.common.process.time_slice import TimeSlice
from services.common.request_ids import is_chosen
from services.gateway.engine.active_request import ActiveSample, SchedulerRequest
from services.gateway.engine.codec import SampleAction, SampleEnding
from services.gateway.engine.metrics import FailoverReason, RequestMetrics
from services.gateway.engine.quarantine import PROVEN, FailoverQuarantine
from services.gateway.engine.replica import Replica

log = structlog.get_logger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0  # before a refused request is sent again
_POLL_S = 0.1  # interval of checks for timeouts while requests are queued
_MAX_QUEUED = 16_384  # with more queued requests, new ones are rejected


@dataclass
class _Wait:
    """A request's time without a scheduler, until one accepts it. Times are of ``time.monotonic``."""

    reason: FailoverReason | None  # None: the request is new
    error: TokaError  # with which the request fails at the deadline
    deadline: float
    not_before: float = 0.0
    pause: float = _FIRST_PAUSE_S
    refused_by: str | None = None  # address of the replica


class Failover:
    """The queue of requests without a scheduler. Owned by the ``Fleet``, on the gateway's event loop.

    ``run`` is a task that runs as long as the gateway. ``choose(request, address)`` returns the replica for a request,
    or None if none can take it. It avoids the replica at ``address`` if there is another one.
    """

    def __init__(
        self,
        choose: Callable[[SchedulerRequest, str | None], Replica | None],
        metrics: RequestMetrics,
        timeout_s: float,
    ) -> None:
        self._choose = choose
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._waits: WeakKeyDictionary[SchedulerRequest, _Wait] = WeakKeyDictionary()
        self._queue: dict[SchedulerRequest, None] = {}
        self._quarantine = FailoverQuarantine()
        self._wakeup = asyncio.Event()
        self.closed_with: TokaError | None = None

    @property
    def enabled(self) -> bool:
        """True if requests may wait for a scheduler."""
        return self._timeout_s > 0

    def wake(self) -> None:
        """Look for replicas again. Called when one may have become ready."""
        self._wakeup.set()

    def enqueue(self, request: SchedulerRequest, error: TokaError) -> None:
        """Queue a new request, which fails with ``error`` at its deadline.

        Raises ``error`` if failover is disabled, and ``Overloaded`` if the queue is full.
        """
        if not self.enabled:
            raise error
        if len(self._queue) >= _MAX_QUEUED:
            raise Overloaded(f"{len(self._queue)} requests wait for a scheduler; {error.message}", retry_after_s=1.0)
        self._waits[request] = _Wait(None, error, time.monotonic() + self._timeout_s)
        self._put(request)

    def lose(self, tokens: Mapping[ActiveSample, np.ndarray], error: TokaError, reason: FailoverReason) -> None:
        """Queue the samples in ``tokens``, whose scheduler was lost because of ``error``.

        The values are the tokens (uint32) that the samples received since they were sent.
        """
        active_requests = dict.fromkeys(sample.request for sample in tokens)
        if self.closed_with is not None or not self.enabled:
            for active in active_requests:
                active.fail(self.closed_with or error)
            return
        if reason == "worker":
            for sample in tokens:
                sample.losses += 1
        elif reason != "drained":  # a drained scheduler is no evidence against the request
            for sample in self._quarantine.lost(tokens):
                sample.request.fail(_proven(sample, error))
        for active in active_requests:
            with active.failing_on_errors("failover of a request failed"):
                for request in active.replace_lost(tokens):
                    self._waits[request] = _Wait(reason, error, time.monotonic() + self._timeout_s)
                    self._put(request)
        if active_requests:
            log.warning("samples wait for another scheduler", samples=len(tokens), cause=reason)

    def refused(self, request: SchedulerRequest, error: TokaError, by: str) -> None:
        """Queue ``request``, which the scheduler at address ``by`` rejected, or fail it if it may not be retried.

        A rejection for a full queue is retried only if a scheduler had accepted the request before.
        """
        retry = isinstance(error, Unavailable) or (isinstance(error, Overloaded) and request.accepted)
        if self.closed_with is not None or not self.enabled or not retry:
            request.parent.fail(self.closed_with or error)
            return
        now = time.monotonic()
        wait = self._waits.setdefault(request, _Wait("refused", error, now + self._timeout_s))
        least = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        wait.not_before = now + min(max(least, wait.pause), _LAST_PAUSE_S) * random.uniform(0.5, 1.0)
        wait.pause = min(2 * wait.pause, _LAST_PAUSE_S)
        wait.error, wait.refused_by = error, by
        self._put(request)

    def fail_all(self, error: TokaError) -> None:
        """Fail all queued requests, and all later ones, with ``error``."""
        self.closed_with = error
        for request in list(self._queue):
            request.parent.fail(error)
        self._queue.clear()

    def abort(self, request_ids: Collection[str] | None) -> int:
        """End queued requests with the tokens that they have. Return the number of their samples.

        ``request_ids`` is as for ``is_chosen``.
        """
        chosen = self._take(lambda request_id: is_chosen(request_id, request_ids))
        for request in chosen:
            self._abort(request)
        return sum(len(request.samples) for request in chosen)

    def cancel(self, request_id: str) -> int:
        """Cancel a queued request for an operator, with its parts. Return the number of its samples."""
        chosen = self._take(lambda each: each == request_id or each.startswith(f"{request_id}+"))
        for request in chosen:
            request.parent.fail(Cancelled.by_operator())
        return sum(len(request.samples) for request in chosen)

    def act_on(self, request: SchedulerRequest, action: SampleAction) -> None:
        """Remove ``request`` from the queue if it is cancelled or ends. A session parks it after it was sent."""
        if request in self._queue and action != "park":
            del self._queue[request]
            if action == "end":
                self._abort(request)

    def count_tokens(self, request: SchedulerRequest) -> int:
        """Return 0, since a queued request receives no tokens."""
        return 0

    async def run(self) -> None:
        """Send queued requests until the task is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if self._queue or self._quarantine.busy else None):
                    await self._wakeup.wait()
            self._wakeup.clear()
            self._quarantine.release(time.monotonic())
            time_slice = TimeSlice()
            for request in list(self._queue):
                if time_slice.is_over:
                    await time_slice.renew()
                if request in self._queue:
                    self._try(request)

    def _put(self, request: SchedulerRequest) -> None:
        self._quarantine.forget(request)
        request.holder = self
        self._queue[request] = None
        self._wakeup.set()
        if (action := request.due_action) is not None:
            self.act_on(request, action)

    def _take(self, is_meant: Callable[[str], bool]) -> list[SchedulerRequest]:
        """Remove the requests from the queue for whose ids ``is_meant`` is true, and return them."""
        chosen = [each for each in self._queue if is_meant(each.submission.request_id)]
        for request in chosen:
            del self._queue[request]
        return chosen

    def _abort(self, request: SchedulerRequest) -> None:
        """End ``request``, which has left the queue, with the tokens that it has."""
        with request.parent.failing_on_errors("a queued request could not be aborted"):
            self._finish(request)

    def _finish(self, request: SchedulerRequest) -> None:
        parent, prompt_tokens = request.parent, len(request.submission.prompt.prompt_ids)
        if not request.accepted:
            parent.on_accepted()  # a stream waits for it
        for sample in request.samples:
            sample.failover_delay_s = time.perf_counter() - parent.began_at
            if not parent.per_token:
                sample.new_ids = sample.earlier_ids
            ending = SampleEnding(
                "abort",
                at_stop_token=False,
                trailing_bytes=0,
                prompt_tokens=prompt_tokens,
                completion_tokens=len(sample.earlier_ids),
                cached_tokens=0,
                queued_s=0.0,
                prefill_s=0.0,
                decode_s=0.0,
                error=None,
            )
            self._metrics.sample_finished(ending)
            parent.finish(sample, ending)

    def _try(self, request: SchedulerRequest) -> None:
        """Send ``request`` if a replica can take it now. Fail it at its deadline."""
        with errors_to(partial(self._not_sent, request)):
            wait, now = self._waits[request], time.monotonic()
            if now >= wait.deadline:
                raise wait.error
            if now < wait.not_before or not self._quarantine.admits(request):
                return
            replica = self._choose(request, wait.refused_by)
            if replica is None:
                return
            with contextlib.suppress(Overloaded, Unavailable):  # the request stays in the queue
                replica.submit(request)
                self._sent(request, wait, now)
                del self._queue[request]

    def _not_sent(self, request: SchedulerRequest, error: Exception) -> None:
        """End one request. An error of one must not affect the others."""
        self._queue.pop(request, None)
        if isinstance(error, TokaError):
            request.parent.fail(error)
        else:
            request.parent.fail_internal("a request could not be sent", error)

    def _sent(self, request: SchedulerRequest, wait: _Wait, now: float) -> None:
        self._quarantine.sent(request, now)
        for sample in request.samples:
            sample.failover_delay_s = time.perf_counter() - request.parent.began_at
        if wait.reason is not None:
            self._metrics.count_failovers(wait.reason, len(request.samples))


def _proven(sample: ActiveSample, error: TokaError) -> Internal:
    return Internal(
        f"{sample.losses} schedulers in a row were lost with this request and before it got a new token, {PROVEN} of"
        f" them with no other suspect. It is not sent again ({error.message})",
        reason="SCHEDULERS_LOST",
    )
