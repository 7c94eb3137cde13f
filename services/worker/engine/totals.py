"""The total time of steps, for metrics."""

from services.common.plan.result import Timing


class StepTotals:
    """Sums over the completed steps, in nanoseconds. The answering thread adds to them; any thread may read them."""

    def __init__(self) -> None:
        self.steps = 0
        self.queued = self.prepare = self.forward = self.sample = self.device = self.idle = 0

    def add(self, queued_ns: int, timing: Timing) -> None:
        """Add a step with ``timing``, whose plan was queued for ``queued_ns`` nanoseconds."""
        self.steps += 1
        self.queued += queued_ns
        self.prepare += timing.prepare
        self.forward += timing.forward
        self.sample += timing.sample
        self.device += timing.device
        self.idle += timing.idle
