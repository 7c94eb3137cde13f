"""Preempts running sequences for waiting samples.

Parked sequences are preempted for any other sample, sequences of class ``low`` for higher classes, and sequences of one
key for another key. A request of a higher class does not wait until batch jobs release a slot or pages. The first
request of a key does not wait until another key that holds all slots or pages releases them. A preempted sequence goes
back to the queue; its tokens are kept and its pages stay cached.

An eighth of the running sequences may be protected sequences of class low, so that low work completes under any load.
Sequences that would be overdue in the queue are protected, and those that were preempted four times. A key gets slots
in this way only while it was served less than half of its fair share lately, at most a sixteenth of all slots, and only
from keys that have more than their fair share. A sequence that was preempted four times computes some more tokens
before it is preempted for another key, so that all sequences finish.
"""

import numpy as np

from services.scheduler.core.future.admission import AdmissionControl
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.life.victims import by_work, without_overdue
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import Priority, Sample
from services.scheduler.core.state import State
from services.scheduler.core.step.prefill import MOST_ADMISSIONS, Candidates, Prefill

_KEY_SHARE = 16  # others are preempted for a key until it has one in this number of slots
_MOST_SHORT_KEYS = 16  # keys for which others are preempted in one plan


class Preemption:
    """Decides before each plan which sequences are preempted for waiting samples. Owned by the core."""

    def __init__(self, state: State, lifecycle: Lifecycle, prefill: Prefill, admission: type[AdmissionControl]) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._prefill = prefill
        self._admission = admission

    def preempt_for_waiting(self, plan: PlannedStep) -> None:
        """Preempt as few sequences as possible for waiting samples, and none if it would not help.

        This is the first step of building ``plan``. Nothing is preempted for parked samples.
        """
        if waits := self._state.queue.waiting.highest is not None:
            self._preempt_parked(plan)
            self._preempt_for_classes(plan)
        self._state.queue.first = []
        if waits and self._state.queue.quarantined is None and self._state.several_keys:
            self._preempt_for_keys(plan)

    def _preempt_for_keys(self, plan: PlannedStep) -> None:
        """Preempt sequences of keys that have more than their fair share, for keys that are next and have little."""
        state, slots, keys = self._state, self._state.pool.slots, self._state.pool.running_keys
        active = {key for _, key, _ in state.queue.waiting.flows()}.union(keys.numbers)
        fair = max(1, state.pool.shape.max_running // len(active))
        most = max(1, min(fair, state.pool.shape.max_running // _KEY_SHARE))
        short = self._short_of_slots(most, state.queue.recent.behind(active))
        running = slots.running_slots()
        if not short or not len(running):
            return
        count = np.bincount(slots.key[running], minlength=keys.size)
        held = slots.page_count[running] - slots.left_behind[running]
        pages = np.bincount(slots.key[running], weights=held, minlength=keys.size)
        ahead = (count > fair) | (pages * len(active) > state.pool.pages.size)
        for sample in short:
            if (number := keys.numbers.get(sample.request.fairness_key)) is not None:
                ahead[number] = False
        may = ahead[slots.key[running]] & ~slots.guaranteed[running]
        may &= slots.known[running] >= slots.protected_until[running]
        others = running[may & (slots.priority[running] >= short[0].request.priority)]
        budget = max(1, state.pool.shape.max_tokens_per_step - len(slots.decoding()))
        free = state.pool.shape.max_running - slots.running
        entries = self._prefill.gather(plan, short, budget, min(len(short), free + len(others)))
        if not entries:
            return
        order = others[by_work(state, others)]
        order = order[np.lexsort((-count[slots.key[order]], -slots.priority[order], ~slots.parked[order]))]
        candidates = self._prefill.candidates(plan, entries, budget)
        fewest = self._fewest(plan, order, 0, free, candidates)
        if fewest is None:
            self._release_prompts()
        self._lifecycle.preempt_for_others(order[: fewest or 0], to_key=True)
        state.queue.first = candidates.samples

    def _short_of_slots(self, most: int, behind: set[str]) -> list[Sample]:
        """Return the next samples of one class whose keys are in ``behind`` and have less than ``most`` slots."""
        found: list[Sample] = []
        taken: dict[str, int] = {}
        for sample in self._state.in_order(most * _MOST_SHORT_KEYS):
            key = sample.request.fairness_key
            taken[key] = taken.get(key, self._state.pool.running_keys.users(key)) + 1
            if (
                key not in behind
                or taken[key] > most
                or sample.request.priority != (found or [sample])[0].request.priority
            ):
                break
            found.append(sample)
        return found

    def _preempt_parked(self, plan: PlannedStep) -> None:
        """Preempt parked sequences for waiting samples of any class."""
        slots = self._state.pool.slots
        running = slots.running_slots()
        parked = running[slots.parked[running]]
        self._lifecycle.stragglers.release_prompts()
        waiting = self._state.in_order(MOST_ADMISSIONS) if len(parked) else []
        self._preempt_below(plan, parked, [sample for sample in waiting if not sample.request.parked])

    def _preempt_for_classes(self, plan: PlannedStep) -> None:
        """Preempt sequences of class ``low``, and more parked ones, for waiting samples of higher classes."""
        state, slots = self._state, self._state.pool.slots
        highest = state.queue.waiting.highest
        if highest is None or highest >= Priority.LOW:
            return
        running = slots.running_slots()
        low = running[slots.preemptible[running] & ~slots.parked[running]]
        if len(low):
            low = np.union1d(without_overdue(state, low), running[slots.parked[running]])
        waiting = state.in_order(MOST_ADMISSIONS) if len(low) else []
        above = [sample for sample in waiting if sample.request.priority < Priority.LOW]
        if not self._preempt_below(plan, low, above):
            self._release_prompts()

    def _release_prompts(self) -> None:
        """Release the shared prompts that are held for waiting samples of class low."""
        held = [request for request in self._state.pool.sharing if request.priority == Priority.LOW]
        for request in held:
            self._lifecycle.shares.end(request)

    def _preempt_below(self, plan: PlannedStep, low: np.ndarray, above: list[Sample]) -> bool:
        """Preempt the smallest number of the slots ``low`` (int64) that admits waiting samples of ``above``.

        Return False if the first of ``above`` does not fit even if all of ``low`` are preempted.
        """
        state = self._state
        if not len(low) or not above:
            return True
        budget, blocking = self._budget(low)
        free = state.pool.shape.max_running - state.pool.slots.running
        entries = self._prefill.gather(plan, above, budget, min(MOST_ADMISSIONS, free + len(low)))
        if not entries:
            return True
        candidates = self._prefill.candidates(plan, entries, budget)
        others = np.setdiff1d(low, blocking)
        order = np.concatenate((blocking, others[by_work(state, others)]))
        count = self._fewest(plan, order, len(blocking), free, candidates)
        self._lifecycle.preempt_for_others(order[: count or 0])
        return count is not None

    def _budget(self, low: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the tokens that a plan has for new prompts, and the slots of ``low`` to preempt first, int64.

        The latter are slots whose own prompts would take all tokens of the plan.
        """
        state = self._state
        budget = state.pool.shape.max_tokens_per_step - len(state.pool.slots.decoding())
        begun = np.array(state.pool.prefilling, np.int64)
        rest = state.pool.tokens_to_prefill()
        if rest < budget:
            return budget - rest, begun[:0]
        if np.isin(begun, low).all():
            return max(budget, 1), begun  # a preempted sequence leaves at least one token
        return 0, begun[:0]

    def _fewest(
        self, plan: PlannedStep, order: np.ndarray, least: int, free: int, candidates: Candidates
    ) -> int | None:
        """Return how many slots of ``order``, from the first on, to preempt.

        It is the smallest number with which as many candidates fit as if all of ``order`` were preempted. None: the
        first candidate does not fit.
        """
        # As of the plan before, because this plan has not computed anything yet.
        sequences = candidates.sequences.delayed(1)
        classes, step = candidates.classes, plan.step - 1
        count = self._admission(self._state, step, without=order).fitting(sequences, classes)
        if count == 0:
            return None
        chosen = np.arange(count)
        sequences, classes = sequences.take(chosen), classes[chosen]

        def suffices(count: int) -> bool:
            return self._admission(self._state, step, without=order[:count]).fits(sequences, classes)

        fails, enough = max(least, count - free, 0) - 1, len(order)
        trial = fails + 1
        while enough - fails > 1:
            if suffices(trial):
                enough = trial
            else:
                fails = trial
            trial = (fails + enough) // 2
        return enough
