"""Builds one plan: continuous batching with chunked prefill."""

import numpy as np

from services.scheduler.core.counters import STEP_SIZES
from services.scheduler.core.future.admission import AdmissionControl
from services.scheduler.core.future.prediction import Prediction
from services.scheduler.core.future.time_sharing import KeyTimeSlice, TimeSharing
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.life.victims import choose_victims
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import Priority
from services.scheduler.core.state import State
from services.scheduler.core.step.batching import Batching
from services.scheduler.core.step.preemption import Preemption
from services.scheduler.core.step.prefill import Prefill, Rows

_MOST_LIGHT = 3  # light plans in a row


class Planner:
    """Builds plans, and advances the state as if each plan had run. Owned by the core."""

    def __init__(self, state: State, lifecycle: Lifecycle, admission: type[AdmissionControl]) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._prediction = Prediction(state)
        self._prefill = Prefill(state, lifecycle, self._prediction, admission)
        self._preemption = Preemption(state, lifecycle, self._prefill, admission)
        self._batching = Batching(state)
        self._time_sharing = TimeSharing(state)
        self._light_in_a_row = 0  # light plans since the last other plan

    def build(self, now_ns: int, *, light: bool = False) -> PlannedStep | None:
        """Return the next plan, or None if there is nothing to compute.

        A ``light`` plan is built quickly because the worker is about to become idle: it leaves admissions, predictions
        and Hydragen groups to a later plan. At most three plans in a row are light.
        """
        state = self._state
        plan = PlannedStep(step=state.pool.step + 1)
        light = light and self._light_in_a_row < _MOST_LIGHT
        if light:
            state.queue.first = []  # of the plan before
        else:
            self._prediction.refresh(plan.step)
            self._preemption.preempt_for_waiting(plan)
        time_slice = self._time_sharing.next()
        decoding, prefilling = self._compute(plan, time_slice, now_ns, light=light)
        if time_slice is not None and len(decoding) == 0 and not prefilling:
            state.pool.slots.end_step[time_slice.paused] -= 1  # the plan is made for all keys instead
            decoding, prefilling = self._compute(plan, None, now_ns, light=light)
        if len(decoding) == 0 and not prefilling:
            return None
        self._charge(decoding, prefilling)
        self._count_tail(decoding, prefilling)
        # Not before: otherwise this plan could copy onto a page from which it also copies.
        for request in [request for request in state.pool.sharing if not request.waiting]:
            self._lifecycle.shares.end(request)
        state.pool.step = plan.step
        state.queue.counters.steps += 1
        plan.releases = np.array([slot for slot, _ in state.pool.to_release], np.int64)
        plan.released_ids = [request_id for _, request_id in state.pool.to_release]
        plan.preempted_ids, state.pool.preempted = state.pool.preempted, []
        state.pool.to_release = []
        self._batching.fill(plan, decoding, prefilling, regroup=not light)
        state.queue.counters.step_tokens += plan.tokens
        state.queue.steps_by_tokens[min((plan.tokens - 1).bit_length(), STEP_SIZES - 1)] += 1
        return plan

    def _compute(
        self, plan: PlannedStep, time_slice: KeyTimeSlice | None, now_ns: int, *, light: bool
    ) -> tuple[np.ndarray, Rows]:
        """Put tokens into the plan. Return the slots that decode, and the rows of prompts."""
        state = self._state
        self._lifecycle.leave_behind()
        decoding = self._decode(plan, time_slice)
        budget = state.pool.shape.max_tokens_per_step - len(decoding)
        if light and len(decoding):
            self._light_in_a_row += 1
            plan.postponed = bool(state.queue.waiting)
            state.queue.counters.postponed_plans += plan.postponed
            return decoding, self._prefill.continue_prefill(plan, budget, time_slice)
        self._light_in_a_row = 0
        if state.queue.quarantined is None and state.several_keys:
            return decoding, self._prefill.share_prefill(plan, budget, now_ns, time_slice)
        prefilling = self._prefill.continue_prefill(plan, budget)
        return decoding, prefilling + self._prefill.admit(plan, budget - plan.prefill_tokens, now_ns)

    def _charge(self, decoding: np.ndarray, prefilling: Rows) -> None:
        """Count the tokens that the plan computes for each key."""
        state, slots = self._state, self._state.pool.slots
        if not state.several_keys:
            if state.queue.waiting and (only := state.pool.running_keys.only) is not None:
                state.queue.waiting.charge_only(only, len(decoding) + sum(tokens for _, tokens in prefilling))
            return
        chosen, counts = np.array(prefilling, np.int64).reshape(-1, 2).T
        rows = np.concatenate((decoding, chosen))
        weights = np.concatenate((np.ones(len(decoding), np.int64), counts))
        classes = len(Priority)
        tokens = np.bincount(slots.key[rows] * classes + slots.priority[rows], weights=weights,
                             minlength=state.pool.running_keys.size * classes)  # fmt: skip
        computed: dict[str, int] = {}
        for key, number in state.pool.running_keys.numbers.items():
            of_classes = tokens[number * classes : (number + 1) * classes]
            computed[key] = int(of_classes.sum())
            for priority in Priority:
                if of_classes[priority]:
                    state.queue.waiting.charge(priority, key, int(of_classes[priority]))
        state.queue.recent.charge(computed, state.pool.shape.max_tokens_per_step)

    def _count_tail(self, decoding: np.ndarray, prefilling: Rows) -> None:
        """Count the rows of samples in the tail of their group."""
        counters, tail = self._state.queue.counters, self._state.pool.slots.tail
        rows = int(np.count_nonzero(tail[decoding])) + sum(bool(tail[slot]) for slot, _ in prefilling)
        counters.tail_rows += rows
        counters.tail_steps += rows == len(decoding) + len(prefilling)

    def _decode(self, plan: PlannedStep, time_slice: KeyTimeSlice | None) -> np.ndarray:
        """Compute one more token for every sequence that is past its prompt, and take pages for these tokens.

        If pages run out, release prompts that only waiting samples need, then preempt sequences.
        """
        state, slots, size = self._state, self._state.pool.slots, self._state.pool.shape.page_size
        decoding = slots.decoding()
        if time_slice is not None:
            decoding = decoding[~time_slice.paused[decoding]]
        while True:
            position = slots.scheduled[decoding]
            full = decoding[position >= slots.page_count[decoding] * size]
            missing = len(full) - state.pool.pages.available
            if missing <= 0:
                break
            idle = next((request for request, share in state.pool.sharing.items() if share.leader is None), None)
            if idle is not None:
                self._lifecycle.shares.end(idle)
                continue
            victims = choose_victims(state, missing)
            if len(victims) == 0:
                break  # ``take`` raises
            self._lifecycle.preempt(victims)
            decoding = decoding[slots.active[decoding]]
        if len(full):
            pages = state.pool.pages.take(len(full))
            slots.table[full, slots.page_count[full]] = pages
            slots.page_count[full] += 1
            # If its token is not known yet, the result will write it.
            state.pool.pages.tokens[pages, 0] = slots.last_token[full]
            plan.append_slots, plan.append_pages = full, pages
        slots.scheduled[decoding] = position + 1
        plan.sampling, plan.tokens = [decoding], len(decoding)
        return decoding
