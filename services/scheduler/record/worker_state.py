"""What a worker holds after the plans of a recording so far, and whether each step keeps the contract."""

from services.common.plan.codec import decode_limits
from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.occupants import Occupants
from services.scheduler.record.reader import RecordedStep, Recording
from services.scheduler.record.violation import PlanViolation


class WorkerState:
    """Plays one recording from its beginning."""

    def __init__(self, recording: Recording) -> None:
        self.checker = PlanChecker(decode_limits(recording.info))
        self.occupants = Occupants()
        self._plans_in_flight = recording.connected.plans_in_flight

    def apply(self, step: RecordedStep) -> int:
        """The plan and its answer; returns the number of tokens sampled. Raises ``Violation``, and is of no use then
        but for the names of its occupants.
        """
        self._check_in_flight(step)
        self._check_releases(step)
        self.occupants.apply(step.plan)
        self.checker.apply(step.plan.plan)
        return self.checker.answered(step.result.result if step.result else None)

    def _check_in_flight(self, step: RecordedStep) -> None:
        if step.unanswered > self._plans_in_flight:
            raise _violation(
                step,
                f"{step.unanswered} plans without an answer, and plans_in_flight={self._plans_in_flight} was agreed",
            )

    def _check_releases(self, step: RecordedStep) -> None:
        """A free slot in ``release_slots`` is the checker's to find."""
        for slot, request_id in zip(step.plan.plan.release_slots, step.plan.released_ids, strict=True):
            occupant = self.occupants.get(slot)
            if occupant is not None and occupant.request_id != request_id:
                raise _violation(step, f"released as one of the request {request_id!r}, and it is another's", slot)


def _violation(step: RecordedStep, message: str, slot: int | None = None) -> PlanViolation:
    violation = PlanViolation(message, slot=slot)
    violation.step = step.plan.plan.step
    return violation
