"""Detects that the scheduler itself hangs: requests are unfinished, but no plan is made for them."""

from services.common.errors import Internal
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.step_timeout import StepTimeout


class PlanningTimeout:
    """Timeout that runs while the core is ``stuck``. Used by the step loop.

    After half of the deadline the scheduler is not ready, so gateways route new requests to other replicas. At the
    deadline the step loop fails.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._timeout = StepTimeout(deadline_s)
        self._stuck = False

    def check(self, core: Scheduler, now: float, *, connected: bool) -> None:
        """Check the core in each iteration after planning. Raises ``Internal`` when the timeout expires.

        ``now`` is in seconds of a monotonic clock. ``connected`` means that a worker is connected.
        """
        was_stuck, self._stuck = self._stuck, connected and core.stuck
        if not (was_stuck and self._stuck):
            self._timeout.restart(now)
        elif self._timeout.check(now):
            state = core.state
            raise Internal(
                f"{len(state.queue.requests)} requests are unfinished, {len(state.queue.waiting)} samples wait and"
                f" {state.pool.slots.running} run, and no plan was made for them for {self._timeout.seconds:.0f} s"
                " (flag step_deadline)"
            )

    @property
    def reason(self) -> str:
        """The reason why the scheduler is not ready, or an empty string."""
        if self._timeout.seconds < self._deadline_s / 2:
            return ""
        return "requests are unfinished, and no plan is made for them"

    def until_check(self) -> float | None:
        """Return the seconds until the next ``check``, or None if only an event can change the state."""
        return self._timeout.until_check() if self._stuck else None
