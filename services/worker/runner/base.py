"""The interface of runners, which execute plans on a device."""

from typing import Protocol

from services.common.plan.types import Plan, WorkerLimits
from services.worker.step.output import StepOutput


class DeviceLost(RuntimeError):
    """The device cannot run further steps. The process has to restart."""


class RunningStep(Protocol):
    """A step that a device computes while the next step is prepared."""

    def result(self) -> StepOutput:
        """Wait for the step, and return its output. Call it once for each step, in order.

        An exception ends the engine, since the device cannot run further steps.
        """


class Runner(Protocol):
    """A runner of plans. Only the compute thread calls it; any thread may call ``RunningStep.result``."""

    limits: WorkerLimits

    def start(self, plan: Plan) -> StepOutput | RunningStep:
        """Start a step, and return it or, on a CPU, its output.

        Raises ``InvalidRequest`` or ``FailedPrecondition`` for a plan that breaks the contract, without changing
        anything. Raises ``DeviceLost`` if the engine must end.
        """

    def weights_changed(self) -> None:
        """Refresh what was derived from the model's weights, which changed in place between two steps."""

    def reset(self) -> None:
        """Free every slot and expect step 1 next."""

    def close(self) -> None:
        """Release the device and the threads, after the last step."""
