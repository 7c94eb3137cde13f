"""Interface of the core: submit and cancel requests, plan steps, take results, attach and detach the worker."""

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from services.common.errors import Cancelled, Internal, Unavailable
from services.common.plan.result import StepResult
from services.common.plan.result_rules import BrokenResult, check_result
from services.common.plan.types import WorkerLimits
from services.common.request_ids import is_chosen
from services.scheduler.core.future.admission import AdmissionControl
from services.scheduler.core.life.intake import Intake
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.life.quarantine import Quarantine
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.policy import Policy
from services.scheduler.core.queue.deadlines import Deadlines
from services.scheduler.core.request import FinishReason, PauseMode, Request, Sample
from services.scheduler.core.state import State
from services.scheduler.core.step.planner import Planner
from services.scheduler.core.step.results import Results


class _Pending(NamedTuple):
    """A plan in flight."""

    sampling: np.ndarray  # int64, slots for which it samples a token
    follows: bool  # as in ``PlannedStep``


class Scheduler:
    """The core of the scheduler, used by one thread.

    The caller passes the time: ``now_ns`` and ``now_ms`` are of the monotonic clock. A sink is the owner of a set of
    handles: a session, or one Generate call.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        policy: Policy | None = None,
        *,
        admission: type[AdmissionControl] = AdmissionControl,
    ) -> None:
        """Create the core without a worker. ``admission`` is the admission rule, which benchmarks replace."""
        self.state = State(token_bytes, vocab_size, policy or Policy())
        self._lifecycle = Lifecycle(self.state)
        self.quarantine = Quarantine(self.state, self._lifecycle)
        self._admission = admission
        self.deadlines = Deadlines()
        self._intake = Intake(self.state, self.deadlines)
        self._sinks: dict[int, dict[int, Sample]] = {}
        self._pending: dict[int, _Pending] = {}  # by step, plans in flight
        self._has_work = False  # since the last plan, there has been work for another one
        self.step_s = 0.0  # recent duration of a step, set by the step loop

    # -- the worker

    def attach(self, shape: WorkerLimits, *, asleep: bool = False) -> None:
        """Attach a new worker, which may be ``asleep``. Samples that cannot run on it end with an error."""
        state = self.state
        state.attach(shape)
        self._planner = Planner(state, self._lifecycle, self._admission)
        self._results = Results(state, self._lifecycle)
        for sample in list(state.queue.waiting):
            if sample.request.limit > min(shape.max_context_tokens, shape.pool_tokens + 1):
                error = Internal("the worker came back smaller than the one that accepted this request; send it again")
                self._lifecycle.end([sample], FinishReason.ERROR, error)
        self.quarantine.worker_attached(self._intake.canary)
        if asleep:
            self.sleep()

    def detach(self) -> None:
        """Detach the lost worker. Running samples go back to the head of the queue, with their tokens."""
        state = self.state
        if not state.attached:
            return
        computing = self._computing()
        self._lifecycle.requeue_all()
        self.quarantine.worker_lost(computing)
        self._end_broken()
        state.attach(state.pool.shape)  # an empty pool until the next worker is attached
        self._pending.clear()
        self._has_work = False

    def _computing(self) -> list[Sample]:
        """Return the samples in the plans in flight, in order of arrival."""
        state, slots = self.state, self.state.pool.slots
        if not self._pending:
            return []
        rows = [each.sampling[slots.admitted_step[each.sampling] <= step] for step, each in self._pending.items()]
        found = np.unique(np.concatenate((*rows, np.array(state.pool.prefilling, np.int64))))
        return sorted(slots.samples[found[slots.active[found]]].tolist(), key=attrgetter("arrival"))

    # -- requests

    def open_sink(self, sink: int) -> None:
        """Register a sink, which is a precondition for requests of it."""
        self._sinks[sink] = {}

    def close_sink(self, sink: int) -> None:
        """Cancel all samples of a sink, and drop its output. Does nothing for a closed sink."""
        self._end(list(self._sinks.get(sink, {}).values()), FinishReason.CANCELLED)
        self._sinks.pop(sink, None)

    def live(self, sink: int) -> int:
        """Return the number of unfinished samples of a sink."""
        return len(self._sinks[sink])

    def submit(self, request: Request, now_ns: int) -> None:
        """Queue a request. If this raises, nothing has changed. Raises ``TokaError``."""
        handles = self._sinks.get(request.sink)
        if handles is None:
            raise Unavailable("the stream of this request is closed")
        self._intake.submit(request, handles, now_ns, self.step_s)

    def cancel(self, sink: int, handles: Sequence[int]) -> None:
        """Cancel samples. Unknown handles are of finished samples, and are ignored."""
        self._end(self._live_samples(sink, handles), FinishReason.CANCELLED)

    def end(self, sink: int, handles: Sequence[int]) -> None:
        """End samples early with their tokens, as ABORTED. Unknown handles are of finished samples, and are ignored."""
        self._end(self._live_samples(sink, handles), FinishReason.ABORTED)

    def park(self, sink: int, handles: Sequence[int]) -> None:
        """Park all unfinished samples of the requests of samples. Unknown handles are ignored."""
        for sample in self._live_samples(sink, handles):
            if not sample.finished:
                self._lifecycle.stragglers.park(sample.request)

    def cancel_request(self, request_id: str) -> int:
        """Cancel the unfinished samples of a request for an operator. Return their number."""
        request = self.state.queue.requests.get(request_id)
        live = [] if request is None else [sample for sample in request.samples if not sample.finished]
        self._lifecycle.end(live, FinishReason.CANCELLED, Cancelled.by_operator())
        self._end_broken()
        return len(live)

    # -- pauses

    def pause(self, mode: PauseMode, *, recompute: bool = False) -> int:
        """Stop to plan until ``resume``. With ``WAIT``, only once every request accepted before has finished.

        ``recompute`` preempts all running sequences and resets the prefix cache, so that their tokens are computed
        again after the pause. Return the number of samples that ``ABORT`` ended. A pause replaces an earlier one.
        """
        queue = self.state.queue
        queue.pause = mode
        queue.waiting.admitted_before = self._intake.arrivals if mode is PauseMode.WAIT else None
        aborted = self.abort() if mode is PauseMode.ABORT else 0
        if recompute and self.state.attached:
            self._lifecycle.preempt_all()
            self.reset_prefix_cache()
        return aborted

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End the unfinished samples of requests with the tokens that they have. Return their number.

        ``request_ids`` is as for ``is_chosen``.
        """
        chosen = [each for name, each in self.state.queue.requests.items() if is_chosen(name, request_ids)]
        samples = [sample for request in chosen for sample in request.samples if not sample.finished]
        self._end(samples, FinishReason.ABORTED)
        return len(samples)

    def resume(self) -> None:
        """Plan again. Does nothing if the core is not paused."""
        self.state.queue.pause = self.state.queue.waiting.admitted_before = None

    @property
    def is_paused(self) -> bool:
        """True if a pause or a sleep has begun: no plan is in flight, and none is made before its end."""
        return self._makes_no_plan and not self._pending

    @property
    def _makes_no_plan(self) -> bool:
        """True if a sleep or a pause forbids plans.

        A pause with ``WAIT`` does so once the requests accepted before have finished.
        """
        queue = self.state.queue
        if queue.asleep or queue.pause is None:
            return queue.asleep
        before = queue.waiting.admitted_before
        oldest = next(iter(queue.requests.values()), None)  # requests are in order of arrival
        return before is None or oldest is None or oldest.samples[0].arrival >= before

    def sleep(self) -> None:
        """Stop planning until ``wake``, whether paused or not. All tokens are computed again later.

        A pause must have begun, or the core must be asleep.
        """
        self.state.queue.asleep = True
        if self.state.attached:
            self._lifecycle.preempt_all()
            self.reset_prefix_cache()

    def wake(self) -> None:
        """Plan again, unless the core is paused."""
        self.state.queue.asleep = False

    def reset_prefix_cache(self) -> int:
        """Let no sample that is admitted later use pages that are computed now.

        Return the number of pages that this frees.
        """
        if not self.state.attached:
            return 0
        pages = self.state.pool.pages
        before = pages.free
        self._lifecycle.end_shares()
        self.state.pool.tree.reset()
        return pages.free - before

    def change_weights(self, version: str) -> None:
        """Record that the worker has other weights from the next plan on. No plan is in flight.

        ``version`` may be equal to that of the weights before.
        """
        self._lifecycle.close_spans()
        self.state.queue.weights_version = version
        self.reset_prefix_cache()

    def end_overdue(self, now_ms: int) -> None:
        """End the requests past their deadline."""
        for request in self.deadlines.due(now_ms):
            self._end(request.samples, FinishReason.DEADLINE)

    def fail(self, sink: int, handle: int, error: Exception) -> None:
        """End the request of a sample whose output could not be delivered because of ``error``."""
        if (sample := self._sinks.get(sink, {}).get(handle)) is not None:
            self.state.queue.broken.setdefault(sample.request, error)
            self._end_broken()

    def take_failures(self) -> list[tuple[str, Exception]]:
        """Return the requests that an unexpected error ended since the last call, as (id, error), for the log."""
        failures, self.state.queue.failures = self.state.queue.failures, {}
        return list(failures.items())

    def _end_broken(self) -> bool:
        """End requests with unexpected errors. Return whether there were any."""
        any_broken, failures = bool(self.state.queue.broken), self.state.queue.failures
        while self.state.queue.broken:  # ending a request may add others
            request, error = self.state.queue.broken.popitem()
            failures.setdefault(request.request_id, error)
            self._lifecycle.end(request.samples, FinishReason.ERROR, Internal.logged())
        return any_broken

    def _live_samples(self, sink: int, handles: Sequence[int]) -> list[Sample]:
        """Return the samples of ``handles`` whose end ``sink`` has not received, each once."""
        live = self._sinks.get(sink, {})
        return [live[handle] for handle in dict.fromkeys(handles) if handle in live]

    def _end(self, samples: Sequence[Sample], reason: FinishReason) -> None:
        """End the unfinished samples among ``samples``."""
        self._lifecycle.end(samples, reason)
        self._end_broken()

    # -- steps

    @property
    def plans_in_flight(self) -> int:
        """The number of plans without a result."""
        return len(self._pending)

    @property
    def oldest_step(self) -> int | None:
        """The number of the oldest plan in flight, or None."""
        return next(iter(self._pending), None)

    @property
    def stuck(self) -> bool:
        """True if there are unfinished requests, no plan is in flight, and the core is not paused.

        After ``plan`` this is never so, because a request that waits for no other request either fits or fails.
        """
        unfinished = self.state.attached and bool(self.state.queue.requests) and not self._pending
        return unfinished and not self.is_paused

    def set_steps_ahead(self, plans: int) -> None:
        """Set the limit of plans in flight, if that is safe.

        The forecast assumes that pages are released this number of plans after the last token. A higher limit delays
        releases beyond the forecast, so it is set only if the pool suffices for all running sequences at their limits.
        A lower limit brings releases forward, but not to plans that were sent already.
        """
        more, pool = plans - self.state.queue.steps_ahead, self.state.pool
        if more and self.state.attached:
            if more > 0 and not pool.holds_longest():
                return
            running = pool.slots.running_slots()
            ends = pool.slots.end_step[running]
            pool.slots.end_step[running] = np.maximum(ends + more, np.minimum(ends, pool.step + 1))
        self.state.queue.steps_ahead = plans

    def plan(self, now_ns: int, *, light: bool = False) -> PlannedStep | None:
        """Return the next plan, or None if no plan is allowed or needed. ``light`` is as for ``Planner.build``."""
        if len(self._pending) >= self.state.queue.steps_ahead:
            return None
        plan = self._build(now_ns, light=light)
        if plan is not None:
            plan.follows = self._has_work
            slots = plan.sampling[0] if len(plan.sampling) == 1 else np.concatenate(plan.sampling)
            self._pending[plan.step] = _Pending(slots, plan.follows)
        self._has_work = plan is not None
        return plan

    def _build(self, now_ns: int, *, light: bool) -> PlannedStep | None:
        plan, more = None, not self._makes_no_plan
        while plan is None and more:
            if self.state.queue.quarantined is not None:  # one plan in flight, so that a loss is due to this plan
                if self._pending:
                    return None
                self.quarantine.select_group()
            plan = self._planner.build(now_ns, light=light)
            more = self._end_broken() or self.quarantine.is_over  # other samples may be able to run now
        return plan

    def take(self, result: StepResult, now_ns: int) -> None:
        """Process the result of the oldest plan in flight. Raises ``BrokenResult`` if it does not fit the plan."""
        expected = next(iter(self._pending), None)
        if result.step != expected:
            raise BrokenResult(f"expected the result of step {expected}", step=result.step)
        pending = self._pending[result.step]
        check_result(result, pending.sampling, self.state.pool.shape)
        del self._pending[result.step]
        self.quarantine.result_received()
        counters, timing = self.state.queue.counters, result.timing
        counters.device_busy_ns += timing.device
        if pending.follows:
            counters.device_idle_ns += timing.idle
            counters.device_late_ns += timing.late
        self._results.take(result, now_ns)
        self._end_broken()

    def take_output(self) -> list[tuple[int, Delta]]:
        """Return the output since the last call as (sink, delta), for open sinks. Free the finished handles."""
        step = self.state.pool.step if self.state.attached else 0
        output = [each for each in self.state.queue.outbox.take(step) if each[0] in self._sinks]
        for sink, delta in output:
            live = self._sinks[sink]
            for finish in delta.finished:
                live.pop(finish.handle, None)
        return output
