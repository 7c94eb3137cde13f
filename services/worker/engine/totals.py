"""What steps took, added up for metrics."""

from services.common.plan.result import Timing


class StepTotals:
    """Sums over the steps that were answered, in nanoseconds. Added to by the thread that answers; read by any."""

    def __init__(self) -> None:
        self.steps = 0
        self.queued = self.prepare = self.forward = self.sample = self.device = self.idle = 0

    def add(self, queued_ns: int, timing: Timing) -> None:
        self.steps += 1
        self.queued += queued_ns
        self.prepare += timing.prepare
        self.forward += timing.forward
        self.sample += timing.sample
        self.device += timing.device
        self.idle += timing.idle
