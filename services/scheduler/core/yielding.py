"""Class ``low`` makes way: what waits in a higher class does not wait until batch jobs leave it a slot or pages.

A low sequence that yields goes back to the queue like one that is preempted, its tokens kept and its pages cached. So
that low work gets through however much else comes, an eighth of the running sequences may be low ones that do not
yield: those whose age takes them before a higher class, and those that yielded a few times already.
"""

import numpy as np

from services.scheduler.core.admission import Admission
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.onboarding import MOST_ADMISSIONS, Candidates, Onboarding
from services.scheduler.core.plan import Plan
from services.scheduler.core.preemption import by_work, without_those_of_age
from services.scheduler.core.request import Priority
from services.scheduler.core.state import State


class Yielding:
    """Owned by the core."""

    def __init__(
        self, state: State, lifecycle: Lifecycle, onboarding: Onboarding, admission: type[Admission] = Admission
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._onboarding = onboarding
        self._admission = admission

    def make_way(self, plan: Plan, now_ns: int) -> None:
        """Before anything of ``plan`` is decided: as few low sequences yield as let in those who wait above them and
        have a place in this plan. Nobody does where that would not help."""
        state, slots = self._state, self._state.slots
        highest = state.waiting.highest
        if highest is None or highest >= Priority.LOW:
            return
        running = slots.running_slots()
        low = running[slots.yields[running]]
        if len(low):
            low = without_those_of_age(state, low, now_ns)
        if not len(low):
            return
        budget, blocking = self._budget(low)
        waiting = state.in_order(MOST_ADMISSIONS, now_ns)
        above = [sample for sample in waiting if sample.request.priority < Priority.LOW]
        free = state.shape.max_running - slots.running
        entries = self._onboarding.gather(plan, above, budget, min(MOST_ADMISSIONS, free + len(low)))
        if entries:
            candidates = self._onboarding.candidates(plan, entries, budget)
            others = np.setdiff1d(low, blocking)
            order = np.concatenate((blocking, others[by_work(state, others)]))
            self._lifecycle.give_way(order[: self._fewest(plan, order, len(blocking), free, candidates)])

    def _let_go_of_prompts(self) -> None:
        """Those held for waiting samples of class low: the next plan may do with their pages."""
        held = [request for request in self._state.sharing if request.priority == Priority.LOW]
        for request in held:
            self._lifecycle.shares.end(request)

    def _budget(self, low: np.ndarray) -> tuple[int, np.ndarray]:
        """Tokens that ``plan`` has for prompts not begun; and those of ``low`` whose own prompt would take all of them,
        int64: it is computed later."""
        state, slots = self._state, self._state.slots
        budget = state.shape.max_tokens_per_step - len(slots.decoding())
        begun = np.array(state.prefilling, np.int64)
        rest = int((slots.given[begun] - slots.scheduled[begun]).sum())
        if rest < budget:
            return budget - rest, begun[:0]
        if np.isin(begun, low).all():
            return max(budget, 1), begun  # who yields leaves a token at least
        return 0, begun[:0]

    def _fewest(self, plan: Plan, order: np.ndarray, least: int, free: int, candidates: Candidates) -> int:
        """How many of ``order`` must yield, from the first on, for as many candidates as can be let in when all do."""
        # As of the plan before: this one has not computed anything yet.
        sequences = candidates.sequences._replace(
            end=candidates.sequences.end + 1, delay=candidates.sequences.delay + 1
        )
        classes, step = candidates.classes, plan.step - 1
        count = self._admission(self._state, step, without=order).fitting(sequences, classes)
        if count == 0:
            self._let_go_of_prompts()
            return 0
        chosen = np.arange(count)
        sequences, classes = sequences.take(chosen), classes[chosen]

        def suffices(yielding: int) -> bool:
            return self._admission(self._state, step, without=order[:yielding]).fits(sequences, classes)

        fails, enough = max(least, count - free, 0) - 1, len(order)
        trial = fails + 1
        while enough - fails > 1:
            if suffices(trial):
                enough = trial
            else:
                fails = trial
            trial = (fails + enough) // 2
        return enough
