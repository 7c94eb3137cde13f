"""The core as its shell sees it: submit, cancel, plan, take results; attach and detach the worker."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from services.common.errors import Cancelled, Internal, Unavailable
from services.common.plan.result import StepResult
from services.scheduler.core.future.admission import Admission
from services.scheduler.core.future.prediction import Prediction
from services.scheduler.core.future.summary import PageForecast
from services.scheduler.core.life.ending import Ending
from services.scheduler.core.life.intake import Intake
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.life.quarantine import Quarantine
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import PlannedStep, WrongAnswer
from services.scheduler.core.policy import Policy
from services.scheduler.core.queue.deadlines import Deadlines
from services.scheduler.core.request import FinishReason, Request, Sample, WorkerShape
from services.scheduler.core.state import State
from services.scheduler.core.step.load import Load, read_load
from services.scheduler.core.step.planner import Planner
from services.scheduler.core.step.preemption import Preemption
from services.scheduler.core.step.prefill import Prefill
from services.scheduler.core.step.result_check import check_result
from services.scheduler.core.step.results import Results


class _Pending(NamedTuple):
    """A plan that the worker has not answered."""

    sampling: np.ndarray  # int64, slots that will sample
    queued: bool  # it went out while another was in flight


class Scheduler:
    """Owned and driven by one thread. Times come in as arguments: ``now_ns`` of a monotonic clock, ``now_ms`` since the
    epoch. A sink is the owner of a set of handles: a session, or one Generate call.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        policy: Policy | None = None,
        *,
        admission: type[Admission] = Admission,
    ) -> None:
        """``admission``: another rule than the forecast's, to compare with."""
        self.state = State(token_bytes, vocab_size, policy or Policy())
        self._lifecycle = Lifecycle(self.state)
        self._quarantine = Quarantine(self.state, self._lifecycle)
        self._admission = admission
        self._deadlines = Deadlines()
        self._intake = Intake(self.state, self._deadlines)
        self._sinks: dict[int, dict[int, Sample]] = {}
        self._pending: dict[int, _Pending] = {}  # by step, plans in flight
        self.step_s = 0.0  # recent time of a step, kept by the shell

    # -- the worker

    def attach(self, shape: WorkerShape) -> None:
        """A worker that holds nothing is there. Samples that cannot run on it end with an error."""
        state = self.state
        state.attach(shape)
        prediction = Prediction(state)
        prefill = Prefill(state, self._lifecycle, prediction, self._admission)
        preemption = Preemption(state, self._lifecycle, prefill, self._admission)
        self._planner = Planner(state, self._lifecycle, prefill, prediction, preemption)
        self._results = Results(state, self._lifecycle)
        for sample in list(state.queue.waiting):
            if sample.request.limit > min(shape.max_context_tokens, shape.pool_tokens + 1):
                error = Internal("the worker came back smaller than the one that accepted this request; send it again")
                self._lifecycle.finish([Ending(sample, FinishReason.ERROR, error=error)])
        self._quarantine.worker_attached(self._intake.canary)

    def detach(self) -> None:
        """The worker is gone and its pages with it: running samples go back to the head of the queue, tokens kept."""
        state = self.state
        if not state.attached:
            return
        computing = self._computing()
        self._lifecycle.requeue_all()
        self._quarantine.worker_lost(computing)
        self._end_broken()
        shape = state.pool.shape
        state.attach(shape)  # an empty pool until the next worker says otherwise
        self._pending.clear()

    @property
    def suspects(self) -> int:
        """Sequences that the worker may have died of."""
        return self._quarantine.suspects

    @property
    def unreliable_reason(self) -> str:
        """Why the worker that is there is not to be relied on; empty when it is."""
        return self._quarantine.unreliable_reason

    def _computing(self) -> list[Sample]:
        """Those in plans that the worker has not answered, in order of arrival."""
        state, slots = self.state, self.state.pool.slots
        if not self._pending:
            return []
        rows = [each.sampling[slots.admitted_step[each.sampling] <= step] for step, each in self._pending.items()]
        found = np.unique(np.concatenate((*rows, np.array(state.pool.prefilling, np.int64))))
        return sorted(slots.samples[found[slots.active[found]]].tolist(), key=attrgetter("arrival"))

    # -- requests

    def open_sink(self, sink: int) -> None:
        self._sinks[sink] = {}

    def close_sink(self, sink: int) -> None:
        """Nobody listens any more: all its samples end. Closing it again does nothing."""
        self._end(list(self._sinks.get(sink, {}).values()), FinishReason.CANCELLED)
        self._sinks.pop(sink, None)

    def live(self, sink: int) -> int:
        """Unfinished samples of a sink."""
        return len(self._sinks[sink])

    def submit(self, request: Request, now_ns: int) -> None:
        """Queue a request. When it raises, nothing happened."""
        handles = self._sinks.get(request.sink)
        if handles is None:
            raise Unavailable("the stream of this request is closed")
        self._intake.queue(request, handles, now_ns, self.step_s)

    def cancel(self, sink: int, handles: Sequence[int]) -> None:
        """End samples early; unknown handles finished before and are passed over."""
        live = self._sinks.get(sink, {})
        self._end([live[handle] for handle in dict.fromkeys(handles) if handle in live], FinishReason.CANCELLED)

    def cancel_request(self, request_id: str) -> int:
        """End what is left of a request, whoever sent it, and tell its client; how many samples that was."""
        request = self.state.queue.requests.get(request_id)
        live = [] if request is None else [sample for sample in request.samples if not sample.finished]
        error = Cancelled("an operator ended this request")
        self._lifecycle.finish([Ending(sample, FinishReason.CANCELLED, error=error) for sample in live])
        self._end_broken()
        return len(live)

    def end_overdue(self, now_ms: int) -> None:
        """End what is past its deadline."""
        for request in self._deadlines.due(now_ms):
            self._end(request.samples, FinishReason.DEADLINE)

    def next_deadline_ms(self) -> int | None:
        return self._deadlines.next_ms()

    def fail(self, sink: int, handle: int, error: Exception) -> None:
        """Something went wrong with what this sample's client is told: its request ends."""
        if (sample := self._sinks.get(sink, {}).get(handle)) is not None:
            self.state.queue.broken.setdefault(sample.request, error)
            self._end_broken()

    def take_failures(self) -> list[tuple[str, Exception]]:
        """Requests that ended since the last call because something went wrong with them, for the log: (id, what). A
        ``TokaError`` says it all."""
        failures, self.state.queue.failures = self.state.queue.failures, {}
        return list(failures.items())

    def _end_broken(self) -> bool:
        """End requests that something went wrong with; whether there were any."""
        any_broken, failures = bool(self.state.queue.broken), self.state.queue.failures
        while self.state.queue.broken:  # ending them may go wrong, too
            request, error = self.state.queue.broken.popitem()
            failures.setdefault(request.request_id, error)
            live = [sample for sample in request.samples if not sample.finished]
            self._lifecycle.finish([Ending(sample, FinishReason.ERROR, error=Internal.logged()) for sample in live])
        return any_broken

    def _end(self, samples: Sequence[Sample], reason: FinishReason) -> None:
        """End those that have not finished since the last `take_output`; each comes once."""
        self._lifecycle.finish([Ending(sample, reason) for sample in samples if not sample.finished])
        self._end_broken()

    # -- steps

    @property
    def plans_in_flight(self) -> int:
        return len(self._pending)

    @property
    def oldest_step(self) -> int | None:
        """Of the plans in flight."""
        return next(iter(self._pending), None)

    @property
    def stuck(self) -> bool:
        """Requests are unfinished, and no plan is in flight that would bring them on. ``plan`` never leaves it so:
        whoever has nobody to wait for has room, or ends."""
        return self.state.attached and bool(self.state.queue.requests) and not self._pending

    def set_steps_ahead(self, plans: int) -> None:
        """Let ``plans`` be in flight from now on, if that is safe.

        Forecasts count on everything being released so many plans behind its last one. More of them keep pages longer
        than those who were admitted were told; so only where all that runs has room at its longest.
        """
        more = plans - self.state.queue.steps_ahead
        if more > 0 and self.state.attached:
            if not self._has_room_for_all():
                return
            self.state.pool.slots.end_step[self.state.pool.slots.running_slots()] += more
        self.state.queue.steps_ahead = plans

    def _has_room_for_all(self) -> bool:
        slots, pool = self.state.pool.slots, self.state.pool.pages
        running = slots.running_slots()
        most = -(-(slots.limit[running] - 1) // pool.page_size)
        return pool.in_use + int(np.maximum(most - slots.page_count[running], 0).sum()) <= pool.size

    def plan(self, now_ns: int, *, light: bool = False) -> PlannedStep | None:
        """The next plan, if another may be in flight and there is something to compute. ``light``: see `Planner`."""
        if len(self._pending) >= self.state.queue.steps_ahead:
            return None
        plan, more = None, True
        while plan is None and more:
            if self.state.queue.quarantined is not None:  # one plan in flight, so that a loss is due to this plan
                if self._pending:
                    return None
                self._quarantine.select_group()
            plan = self._planner.build(now_ns, light=light)
            more = self._end_broken() or self._quarantine.is_over  # there may be something to do for others
        if plan is not None:
            slots = plan.sampling[0] if len(plan.sampling) == 1 else np.concatenate(plan.sampling)
            self._pending[plan.step] = _Pending(slots, bool(self._pending))
        return plan

    def take(self, result: StepResult, now_ns: int) -> None:
        """Take in the answer to the oldest plan in flight. ``WrongAnswer`` when it answers something else."""
        expected = next(iter(self._pending), None)
        if result.step != expected:
            raise WrongAnswer(f"the worker answered step {result.step}, expected was {expected}")
        pending = self._pending[result.step]
        check_result(result, pending.sampling, self.state.pool.shape)
        del self._pending[result.step]
        self._quarantine.result_received()
        self.state.queue.counters.device_busy_ns += result.timing.device
        if pending.queued:  # else there was nothing that the device could have done
            self.state.queue.counters.device_idle_ns += result.timing.idle
        self._results.take(result, now_ns)
        self._end_broken()

    def take_output(self) -> list[tuple[int, Delta]]:
        """News since the last call, as (sink, delta), for sinks that are open. A finished sample's handle is free from
        here on."""
        step = self.state.pool.step if self.state.attached else 0
        news = [each for each in self.state.queue.outbox.take(step) if each[0] in self._sinks]
        for sink, delta in news:
            live = self._sinks[sink]
            for finish in delta.finished:
                live.pop(finish.handle, None)
        return news

    def load(self, *, not_ready_reason: str, forecast: PageForecast = ()) -> Load:
        """``not_ready_reason``: empty when it is ready."""
        return read_load(
            self.state,
            not_ready_reason=not_ready_reason,
            plans_in_flight=self.plans_in_flight,
            step_s=self.step_s,
            forecast=forecast,
        )
