"""Finds the sequence that workers die of: whoever is under suspicion runs apart from all others.

A worker that is lost was at work on the sequences of the plans that it had not answered. One that was among them twice,
and between got no further than those plans would have brought it, is a suspect. Suspects run before anybody else does,
in groups of an eighth of them, one plan at a time, and without others beside them. Who gets past where it was is free
again. A group in which the worker is lost is divided by eight again, down to one sequence. If that loses the worker
twice more, alone and at the same place, its request ends with an error.

Workers are also lost for reasons of their own. Somebody innocent would have to be met by three further losses within a
few steps each. And some are lost whatever they compute: when several losses in a row came before any answer, the next
worker first computes a canary, a sample of nobody's. Until that is answered nobody else runs or is blamed. So it is
always computed before somebody is ended for what the very first plans did.
"""

from collections import deque
from collections.abc import Callable

from services.common.errors import Internal
from services.scheduler.core.life.ending import Ending
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.request import FinishReason, Sample
from services.scheduler.core.state import State

_SUSPICIOUS = 2  # losses at the same place
_PARTS = 8  # a restart takes longer than trials do, so more than two
_PROVEN = 2  # further losses there, alone: by one, chance would end an innocent now and then
_MUTE = 3  # losses in a row without an answer between; fewer than end a request, or it would answer for the worker


class Quarantine:
    """Outlives workers. Owned by the core; ``state.queue.on_trial`` is its own."""

    def __init__(self, state: State, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._groups: deque[list[Sample]] = deque()  # suspects; the first group is on trial
        self._canary: Sample | None = None
        self._mute = 0  # losses since the last answer

    @property
    def suspects(self) -> int:
        found = (sample for group in self._groups for sample in group if not sample.finished)
        return sum(sample is not self._canary for sample in found)

    @property
    def distrust(self) -> str:
        """Why the worker is not to be relied on; empty when it is."""
        if self._mute < _MUTE:
            return ""
        return f"the worker was lost {self._mute} times in a row before it answered anything"

    @property
    def is_over(self) -> bool:
        """The present trial, since all who were on it have ended."""
        return bool(self._groups) and all(sample.finished for sample in self._groups[0])

    def note_answer(self) -> None:
        """The worker answered a plan."""
        self._mute = 0

    def try_out(self, canary: Callable[[], Sample]) -> None:
        """A new worker is there. If it is not to be relied on, it computes the ``canary``, which waits, before all
        else."""
        if not self.distrust or (self._canary is not None and not self._canary.finished):
            return
        self._canary = canary()
        self._canary.strikes, self._canary.reach = 1, self._canary.known
        self._groups.appendleft([self._canary])
        self._state.queue.on_trial = self._groups[0]

    def note_loss(self, computing: list[Sample]) -> None:
        """The worker is lost, and all who ran wait again. ``computing``: those in plans that it had not answered, in
        order of arrival. Ends the request of a sample that is found out."""
        self._let_go()
        self._mute += bool(computing)
        for sample in computing:
            self._strike(sample)
        suspects = {sample for group in self._groups for sample in group}
        if computing and self._groups:
            self._divide(self._groups.popleft(), computing)
        new = [sample for sample in computing if sample.strikes >= _SUSPICIOUS and sample not in suspects]
        self._groups.extend(_parts(new))
        self._state.queue.on_trial = self._groups[0] if self._groups else None

    def proceed(self) -> None:
        """Between two plans of a trial: let go of those who are past, and go on with the next group."""
        state, before = self._state, self._groups[0]
        self._let_go()
        group = self._groups[0] if self._groups else None
        # Those who are past run on until somebody else is to run alone, or has no room beside them.
        if group is not None and (group is not before or not any(sample.slot >= 0 for sample in group)):
            self._lifecycle.set_aside()
        state.queue.on_trial = group

    def _strike(self, sample: Sample) -> None:
        if sample.known > sample.reach:  # it got on: this is about another place
            sample.strikes = sample.reach = 0
        sample.strikes += 1
        sample.reach = max(sample.reach, sample.known, sample.computed_before)

    def _let_go(self) -> None:
        """Of suspects that are past where they were, or through."""
        for group in self._groups:
            for sample in group:
                if not sample.finished and self._is_past(sample):
                    sample.strikes = sample.strikes_alone = sample.reach = 0
            group[:] = [sample for sample in group if sample.strikes and not sample.finished]
        while self._groups and not self._groups[0]:
            self._groups.popleft()

    def _is_past(self, sample: Sample) -> bool:
        known = sample.known if sample.slot < 0 else int(self._state.pool.slots.known[sample.slot])
        return known > sample.reach

    def _divide(self, group: list[Sample], computing: list[Sample]) -> None:
        """The worker was lost while ``group`` was on trial, or while others ran on who had got past theirs."""
        met = set(computing)
        guilty = [sample for sample in group if sample in met]
        if len(computing) == len(guilty) == 1 and guilty[0] is not self._canary:
            guilty[0].strikes_alone += 1
            if guilty[0].strikes_alone == _PROVEN:
                self._end(guilty[0])
                return
        if spared := [sample for sample in group if sample not in met]:
            self._groups.appendleft(spared)
        self._groups.extendleft(reversed(_parts(guilty)))

    def _end(self, sample: Sample) -> None:
        """With its request: others of the same prompt would go the same way."""
        error = Internal(
            f"the worker was lost {sample.strikes} times while it computed this request, the last {_PROVEN} times while"
            " it computed nothing else",
            reason="QUARANTINED",
        )
        self._state.queue.failures[sample.request.request_id] = error
        samples = [each for each in sample.request.samples if not each.finished]
        self._lifecycle.finish([Ending(each, FinishReason.ERROR, error=error) for each in samples])


def _parts(samples: list[Sample]) -> list[list[Sample]]:
    size = -(-len(samples) // _PARTS)
    return [samples[at : at + size] for at in range(0, len(samples), size)] if samples else []
