"""Sequences that make way for others: class ``low`` for higher classes, and keys with much for keys with little.

A request of a higher class does not wait until batch jobs leave it a slot or pages, nor does the first request of a key
wait until another key that holds them all leaves it some. A sequence that yields goes back to the queue like one that
is preempted, its tokens kept and its pages cached.

So that low work gets through however much else comes, an eighth of the running sequences may be low ones that do not
yield: those whose age takes them before a higher class, and those that yielded a few times already. A key gets slots in
this way only while it was served less than half of its fair share lately, no more than a sixteenth of all, and only
from keys that have more than their fair share. So busy keys lose little, and nothing to each other. A sequence that
yielded a few times makes way for another key only after some more tokens of its answer, so that all get through.
"""

import numpy as np

from services.scheduler.core.future.admission import Admission
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.life.preemption import by_work, without_overdue
from services.scheduler.core.plan import Plan
from services.scheduler.core.request import Priority, Sample
from services.scheduler.core.state import State
from services.scheduler.core.step.onboarding import MOST_ADMISSIONS, Candidates, Onboarding

_KEY_SHARE = 16  # others make way for a key until it has one slot in so many
_MOST_SHORT_KEYS = 16  # keys for which others make way in one plan


class Yielding:
    """Owned by the core."""

    def __init__(
        self, state: State, lifecycle: Lifecycle, onboarding: Onboarding, admission: type[Admission] = Admission
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._onboarding = onboarding
        self._admission = admission

    def make_way(self, plan: Plan) -> None:
        """Preempt for waiting samples, before anything of ``plan`` is decided. As few sequences yield as possible, and
        none where it would not help."""
        self._make_way_for_classes(plan)
        self._state.queue.first = []
        if self._state.queue.apart is None and self._state.queue.waiting and self._state.several_keys:
            self._make_way_for_keys(plan)

    def _make_way_for_keys(self, plan: Plan) -> None:
        """Preempt sequences of keys that have more than their fair share, for keys that are next and have little."""
        state, slots, keys = self._state, self._state.pool.slots, self._state.pool.running_keys
        active = {key for _, key, _ in state.queue.waiting.flows()}.union(key for key, _ in keys.items())
        fair = max(1, state.pool.shape.max_running // len(active))
        most = max(1, min(fair, state.pool.shape.max_running // _KEY_SHARE))
        short = self._short_of_slots(most, state.queue.recent.behind(active))
        running = slots.running_slots()
        if not short or not len(running):
            return
        count = np.bincount(slots.key[running], minlength=keys.size)
        pages = np.bincount(slots.key[running], weights=slots.page_count[running], minlength=keys.size)
        ahead = (count > fair) | (pages * len(active) > state.pool.pages.size)
        for sample in short:
            if (number := keys.number(sample.request.fairness_key)) is not None:
                ahead[number] = False
        may = ahead[slots.key[running]] & ~slots.guaranteed[running]
        may &= slots.known[running] >= slots.firm_until[running]
        others = running[may & (slots.priority[running] >= short[0].request.priority)]
        budget = max(1, state.pool.shape.max_tokens_per_step - len(slots.decoding()))
        free = state.pool.shape.max_running - slots.running
        entries = self._onboarding.gather(plan, short, budget, min(len(short), free + len(others)))
        if not entries:
            return
        order = others[by_work(state, others)]
        order = order[np.lexsort((-count[slots.key[order]], -slots.priority[order]))]
        candidates = self._onboarding.candidates(plan, entries, budget)
        self._lifecycle.give_way(order[: self._fewest(plan, order, 0, free, candidates)], to_key=True)
        state.queue.first = candidates.samples

    def _short_of_slots(self, most: int, behind: set[str]) -> list[Sample]:
        """Return the samples that are next, all of one class, as long as their keys are ``behind`` the others and have
        less than ``most`` slots."""
        found: list[Sample] = []
        taken: dict[str, int] = {}
        for sample in self._state.in_order(most * _MOST_SHORT_KEYS):
            key = sample.request.fairness_key
            taken[key] = taken.get(key, self._state.pool.running_keys.running(key)) + 1
            if (
                key not in behind
                or taken[key] > most
                or sample.request.priority != (found or [sample])[0].request.priority
            ):
                break
            found.append(sample)
        return found

    def _make_way_for_classes(self, plan: Plan) -> None:
        """Preempt sequences of class ``low`` for samples that wait above them."""
        state, slots = self._state, self._state.pool.slots
        highest = state.queue.waiting.highest
        if highest is None or highest >= Priority.LOW:
            return
        running = slots.running_slots()
        low = running[slots.yields[running]]
        if len(low):
            low = without_overdue(state, low)
        if not len(low):
            return
        budget, blocking = self._budget(low)
        waiting = state.in_order(MOST_ADMISSIONS)
        above = [sample for sample in waiting if sample.request.priority < Priority.LOW]
        free = state.pool.shape.max_running - slots.running
        entries = self._onboarding.gather(plan, above, budget, min(MOST_ADMISSIONS, free + len(low)))
        if entries:
            candidates = self._onboarding.candidates(plan, entries, budget)
            others = np.setdiff1d(low, blocking)
            order = np.concatenate((blocking, others[by_work(state, others)]))
            self._lifecycle.give_way(order[: self._fewest(plan, order, len(blocking), free, candidates)])

    def _let_go_of_prompts(self) -> None:
        """Those held for waiting samples of class low: the next plan may do with their pages."""
        held = [request for request in self._state.pool.sharing if request.priority == Priority.LOW]
        for request in held:
            self._lifecycle.shares.end(request)

    def _budget(self, low: np.ndarray) -> tuple[int, np.ndarray]:
        """Tokens that ``plan`` has for prompts not begun; and those of ``low`` whose own prompt would take all of them,
        int64: it is computed later."""
        state, slots = self._state, self._state.pool.slots
        budget = state.pool.shape.max_tokens_per_step - len(slots.decoding())
        begun = np.array(state.pool.prefilling, np.int64)
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
