"""What runs plans, on whatever device."""

from typing import Protocol

from services.common.plan.types import Limits, Plan
from services.worker.step.output import StepOutput


class DeviceLost(RuntimeError):
    """The device computes nothing any more; the process has to be started again."""


class RunningStep(Protocol):
    """A step that a device computes while the next one is prepared."""

    def result(self) -> StepOutput:
        """Waits for it; called once, step by step. What it raises ends the engine: the device cannot go on."""


class Runner(Protocol):
    """Called by the compute thread alone, but for what ``start`` returns."""

    limits: Limits

    def run(self, plan: Plan) -> StepOutput:
        """``start``, and wait for it."""

    def start(self, plan: Plan) -> StepOutput | RunningStep:
        """Raises ``InvalidRequest`` or ``FailedPrecondition``, having changed nothing, for a plan that breaks the
        contract; ``DeviceLost`` ends the engine."""

    def reset(self) -> None:
        """Free every slot and expect step 1 next."""

    def close(self) -> None:
        """No more steps come."""
