"""Builds one plan: continuous batching with chunked prefill."""

import numpy as np

from services.scheduler.core.batching import Batching
from services.scheduler.core.counters import STEP_SIZES
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.onboarding import Onboarding
from services.scheduler.core.plan import Plan
from services.scheduler.core.prediction import Prediction
from services.scheduler.core.preemption import choose_victims
from services.scheduler.core.state import State
from services.scheduler.core.yielding import Yielding

_MOST_HURRIED = 3  # plans in a row


class Planner:
    """State advances when a plan is built: lengths count what every plan sent will have computed. Owned by the core."""

    def __init__(
        self,
        state: State,
        lifecycle: Lifecycle,
        onboarding: Onboarding,
        prediction: Prediction,
        yielding: Yielding,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._onboarding = onboarding
        self._prediction = prediction
        self._yielding = yielding
        self._batching = Batching(state)
        self._hurried = 0  # plans since the last one that was not

    def build(self, now_ns: int, *, hurry: bool = False) -> Plan | None:
        """The next plan, or None when there is nothing to compute.

        ``hurry``: the worker is about to run dry. What can wait (onboarding, predictions, Hydragen groups) then waits
        for a later plan, a few times in a row at most.
        """
        state = self._state
        plan = Plan(step=state.step + 1)
        hurry = hurry and self._hurried < _MOST_HURRIED
        if not hurry:
            self._prediction.refresh(plan.step)
            self._yielding.make_way(plan, now_ns)
        decoding = self._decode(plan)
        budget = state.shape.max_tokens_per_step - len(decoding)
        prefilling = self._onboarding.continue_prefill(plan, budget)
        if hurry and len(decoding):
            self._hurried += 1
            plan.postponed = bool(state.waiting)
            state.counters.postponed_plans += plan.postponed
        else:
            self._hurried = 0
            prefilling += self._onboarding.admit(plan, budget - plan.prefill_tokens, now_ns)
        if len(decoding) == 0 and not prefilling:
            return None
        # Not sooner: a page that this plan copies from must not be a page that it copies onto.
        for request in [request for request in state.sharing if not request.waiting]:
            self._lifecycle.shares.end(request)
        state.step = plan.step
        state.counters.steps += 1
        plan.released = [slot for slot, _ in state.to_release]
        plan.released_ids = [request_id for _, request_id in state.to_release]
        plan.preempted_ids, state.preempted = state.preempted, []
        state.to_release = []
        self._batching.fill(plan, decoding, prefilling, regroup=not hurry)
        state.counters.step_tokens += plan.tokens
        state.steps_by_tokens[min((plan.tokens - 1).bit_length(), STEP_SIZES - 1)] += 1
        return plan

    def _decode(self, plan: Plan) -> np.ndarray:
        """One more token for every sequence that is past its prompt, and the pages where those tokens go."""
        state, slots, size = self._state, self._state.slots, self._state.shape.page_size
        decoding = slots.decoding()
        while True:
            position = slots.scheduled[decoding]
            full = decoding[position >= slots.page_count[decoding] * size]
            missing = len(full) - state.pool.available
            if missing <= 0:
                break
            idle = next((request for request, share in state.sharing.items() if share.leader is None), None)
            if idle is not None:  # what only those hold who wait
                self._lifecycle.shares.end(idle)
                continue
            victims = choose_victims(state, missing)
            if len(victims) == 0:
                break  # `take` says what is wrong
            self._lifecycle.preempt(victims)
            decoding = decoding[slots.active[decoding]]
        if len(full):
            pages = state.pool.take(len(full))
            slots.table[full, slots.page_count[full]] = pages
            slots.page_count[full] += 1
            # If its token is not known yet, the result will write it.
            state.pool.tokens[pages, 0] = slots.last_token[full]
            plan.append_slots, plan.append_pages = full, pages
        slots.scheduled[decoding] = position + 1
        plan.sampling, plan.tokens = [decoding], len(decoding)
        return decoding
