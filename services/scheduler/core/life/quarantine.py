"""Finds the sequences that crash workers, by running suspects without other sequences.

A lost worker may have been crashed by any sequence in its unanswered plans. A sequence becomes a suspect when it was in
such plans twice and had not progressed between the losses beyond what the first of these plans would have computed.
Suspects run before all other samples, in groups of an eighth of the suspects, with one plan in flight. A suspect that
progresses beyond that length is cleared. If the worker is lost again, the group is divided into eighths, down to one
sequence. If the worker is lost twice while this sequence runs alone at the same length, its request ends with an error.

Workers are also lost for other reasons. To end an innocent request, three further losses would have to occur at its
length. And a worker may be lost whatever it computes. So after three losses in a row without a result, the next worker
first computes a canary, a sample of no client. Until its result arrives, no other sequence runs or is suspected. So a
canary is always computed before a request is ended for a crash in the first plans of a worker.
"""

from collections import deque
from collections.abc import Callable

from services.common.errors import Internal
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.request import FinishReason, Sample
from services.scheduler.core.state import State

_SUSPICIOUS = 2  # losses at the same length that make a suspect
_GROUPS = 8  # groups into which suspects are divided; more than two, as a restart takes longer than a test
_LOSSES_ALONE = 2  # losses while it runs alone that end a request; with one, chance would sometimes end an innocent
_UNRELIABLE = 3  # losses in a row without a result after which a canary runs; fewer than end a request


class Quarantine:
    """The suspects, in groups to run alone. Outlives workers. Owned by the core, and owner of ``queue.quarantined``."""

    def __init__(self, state: State, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._groups: deque[list[Sample]] = deque()  # suspects; the first group runs alone
        self._canary: Sample | None = None
        self._losses_without_result = 0  # in a row

    @property
    def suspects(self) -> int:
        """The number of unfinished suspects."""
        found = (sample for group in self._groups for sample in group if not sample.finished)
        return sum(sample is not self._canary for sample in found)

    @property
    def unreliable_reason(self) -> str:
        """The reason why the worker is unreliable, or an empty string."""
        if self._losses_without_result < _UNRELIABLE:
            return ""
        return f"the worker was lost {self._losses_without_result} times in a row before it answered anything"

    @property
    def is_over(self) -> bool:
        """True if all samples of the group that runs alone have finished."""
        return bool(self._groups) and all(sample.finished for sample in self._groups[0])

    def result_received(self) -> None:
        """Record that the worker returned a result."""
        self._losses_without_result = 0

    def worker_attached(self, make_canary: Callable[[], Sample]) -> None:
        """Make an unreliable worker compute a canary first. ``make_canary`` adds one to the queue."""
        if not self.unreliable_reason or (self._canary is not None and not self._canary.finished):
            return
        self._canary = make_canary()
        self._canary.losses, self._canary.reach = 1, self._canary.known
        self._groups.appendleft([self._canary])
        self._state.queue.quarantined = self._groups[0]

    def worker_lost(self, computing: list[Sample]) -> None:
        """Update the suspects after the loss of a worker. All samples wait again.

        ``computing`` are the samples of its unanswered plans in order of arrival. Ends the request of a sample that is
        proven to crash workers.
        """
        self._release_cleared()
        self._losses_without_result += bool(computing)
        for sample in computing:
            self._count_loss(sample)
        suspects = {sample for group in self._groups for sample in group}
        if computing and self._groups:
            self._divide(self._groups.popleft(), computing)
        new = [sample for sample in computing if sample.losses >= _SUSPICIOUS and sample not in suspects]
        self._groups.extend(_divided(new))
        self._state.queue.quarantined = self._groups[0] if self._groups else None

    def select_group(self) -> None:
        """Release cleared suspects between two plans, and select the group that runs alone next."""
        before = self._groups[0]
        self._release_cleared()
        group = self._groups[0] if self._groups else None
        # Cleared samples keep running until another group runs alone, or the group has no room beside them.
        if group is not None and (group is not before or not any(sample.slot >= 0 for sample in group)):
            self._lifecycle.preempt_all()
        self._state.queue.quarantined = group

    def _count_loss(self, sample: Sample) -> None:
        if sample.known > sample.reach:  # it progressed, so this loss is at another length
            sample.losses = sample.reach = 0
        sample.losses += 1
        sample.reach = max(sample.reach, sample.known, sample.computed_before)

    def _release_cleared(self) -> None:
        """Remove the suspects that finished or progressed beyond the length at which workers were lost."""
        for group in self._groups:
            for sample in group:
                if not sample.finished and self._is_cleared(sample):
                    sample.losses = sample.losses_alone = sample.reach = 0
            group[:] = [sample for sample in group if sample.losses and not sample.finished]
        while self._groups and not self._groups[0]:
            self._groups.popleft()

    def _is_cleared(self, sample: Sample) -> bool:
        known = sample.known if sample.slot < 0 else int(self._state.pool.slots.known[sample.slot])
        return known > sample.reach

    def _divide(self, group: list[Sample], computing: list[Sample]) -> None:
        """Divide ``group``, which ran alone, or beside cleared samples, when the worker was lost."""
        lost = set(computing)
        guilty = [sample for sample in group if sample in lost]
        if len(computing) == len(guilty) == 1 and guilty[0] is not self._canary:
            guilty[0].losses_alone += 1
            if guilty[0].losses_alone == _LOSSES_ALONE:
                self._end_request(guilty[0])
                return
        if spared := [sample for sample in group if sample not in lost]:
            self._groups.appendleft(spared)
        self._groups.extendleft(reversed(_divided(guilty)))

    def _end_request(self, sample: Sample) -> None:
        """End the request of ``sample`` with all its samples, as they have the same prompt."""
        error = Internal(
            f"the worker was lost {sample.losses} times while it computed this request, the last {_LOSSES_ALONE} times"
            " while it computed nothing else",
            reason="QUARANTINED",
        )
        self._state.queue.failures[sample.request.request_id] = error
        self._lifecycle.end(sample.request.samples, FinishReason.ERROR, error)


def _divided(samples: list[Sample]) -> list[list[Sample]]:
    size = -(-len(samples) // _GROUPS)
    return [samples[at : at + size] for at in range(0, len(samples), size)] if samples else []
