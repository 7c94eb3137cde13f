"""State of a worker after the recorded plans so far."""

from services.common.plan.codec import decode_limits
from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.occupants import Occupants
from services.scheduler.record.reader import RecordedStep, Recording
from services.scheduler.record.violation import Violation


class WorkerState:
    """Simulates the worker of a recording, and checks that each step keeps the contract."""

    def __init__(self, recording: Recording) -> None:
        self.checker = PlanChecker(decode_limits(recording.info))
        self.occupants = Occupants()
        self._plans_in_flight = recording.connected.plans_in_flight

    def apply(self, step: RecordedStep) -> int:
        """Apply a plan and its result. Return the number of sampled tokens.

        Raises ``Violation``. After that, only the names of the occupants are defined.
        """
        if step.unanswered > self._plans_in_flight:
            message = f"{step.unanswered} plans in flight, and plans_in_flight={self._plans_in_flight} was agreed"
            raise Violation(message, step=step.plan.plan.step)
        self._check_releases(step)
        self.occupants.apply(step.plan)
        self.checker.apply(step.plan.plan)
        return self.checker.result_received(step.result.result if step.result else None)

    def _check_releases(self, step: RecordedStep) -> None:
        """Check the request ids of releases. The checker finds releases of free slots."""
        for slot, request_id in zip(step.plan.plan.release_slots, step.plan.released_ids, strict=True):
            occupant = self.occupants.get(slot)
            if occupant is not None and occupant.request_id != request_id:
                message = f"released for the request {request_id!r}, but it is of another request"
                raise Violation(message, step=step.plan.plan.step, slot=slot)
