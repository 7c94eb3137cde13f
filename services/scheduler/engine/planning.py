"""Builds plans when the worker needs them."""

import time

from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.pace import Pace
from services.scheduler.workers.stream import ReceivedResult, WorkerStream

# Seconds without a new plan after one with tokens of prompts. Building one would delay the thread that sends plans.
SENDING_S = 0.0003
_SHARED_S = 600.0  # after requests of two keys ran together, plans behind long steps are sent late for this time


class Planning:
    """Builds plans at the times that follow from those in flight. Used by the step loop while a worker is attached."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._pace = Pace()
        self._ahead = (1, 1)  # least and most plans in flight
        self._sending_until = 0.0
        self._shared_until = 0.0  # until then plans are sent late, so that requests of all keys can be included
        self.due_at = 0.0  # earliest time of the next plan; 0 if it is not held

    def begin(self, stream: WorkerStream) -> None:
        """Reset the state for the worker of ``stream``, before it is attached to the core."""
        policy, stages, most = self._core.state.policy, stream.info.pipeline_parallel.size, stream.plans_in_flight
        self._ahead, self.due_at = (min(policy.steps_ahead, most), most), 0.0
        self._core.state.queue.steps_ahead = self._ahead[0]
        self._pace.begin((stages - 1) / policy.micro_batches)

    def result_received(self, received: ReceivedResult) -> None:
        """Record the result of the oldest plan in flight."""
        self._pace.result_received(received.received_s, received.result.timing)
        self._core.step_s = self._pace.step_s

    @property
    def is_due(self) -> bool:
        """True if another plan may be sent now."""
        in_flight = self._core.plans_in_flight
        held = in_flight and self.due_at > time.monotonic()
        return in_flight < self._core.state.queue.steps_ahead and not held

    def adjust(self) -> None:
        """Tell the core the measured cost of a step and the limit of plans in flight, which it may refuse to raise."""
        queue, pace = self._core.state.queue, self._pace
        queue.step_cost = pace.times.step_cost or queue.step_cost
        ahead = pace.plans_ahead(queue.steps_ahead, *self._ahead)
        if ahead != queue.steps_ahead:
            self._core.set_steps_ahead(ahead)

    def build(self) -> list[PlannedStep]:
        """Build the plans that are sent together, or none if none is allowed or needed now.

        Without plans in flight it is one plan, now. A plan with tokens of prompts is the last one, so that it is sent
        now. While it is being sent, others wait.
        """
        core, queue, pace = self._core, self._core.state.queue, self._pace
        now, self.due_at = time.monotonic(), 0.0
        if core.plans_in_flight < queue.steps_ahead and (later_s := self._hold(now)):
            self.due_at = now + later_s
            return []
        plans: list[PlannedStep] = []
        most = pace.together if core.plans_in_flight else 1
        while len(plans) < most and not (plans and plans[-1].prefill_tokens):
            begun, waiting = time.monotonic(), bool(queue.waiting)
            light = pace.is_starving(begun, queue.steps_ahead)
            plan = core.plan(time.monotonic_ns(), light=light)
            if plan is None:
                break
            plans.append(plan)
            now, full = time.monotonic(), waiting and not plan.postponed
            pace.sent(now, now - begun, full=full, tokens=plan.tokens, follows=plan.follows)
        return plans

    def sent(self, plans: list[PlannedStep]) -> None:
        """Note that ``plans``, which ``build`` returned, were given to the thread that sends them."""
        if plans[-1].prefill_tokens:
            self._sending_until = time.monotonic() + SENDING_S

    def _hold(self, now: float) -> float:
        """Return the seconds for which to delay the next plan. Without plans in flight, they are 0.

        Behind a long step it is delayed only if keys share the worker, or did recently.
        """
        if self._core.state.several_keys:
            self._shared_until = now + _SHARED_S
        if not self._core.plans_in_flight:
            return 0.0
        needed_s = self._pace.until_needed(now, hold_long=now < self._shared_until)
        return max(needed_s, self._sending_until - now)
