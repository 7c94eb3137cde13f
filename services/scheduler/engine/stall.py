"""Requests are unfinished, and no plan is made for them: a hang that is the scheduler's own."""

from services.common.errors import Internal
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.silence import Silence


class Stall:
    """Counts as ``Silence`` does, from when the core is found ``stuck``. Half way to the deadline the
    scheduler is not ready any more, so that gateways send elsewhere what they have elsewhere for; at its end the step
    loop fails. Owned by the step loop."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._silence = Silence(deadline_s)
        self._stuck = False

    def look(self, core: Scheduler, now: float, *, connected: bool) -> None:
        """In every turn, behind the core's chance to plan. ``now``: seconds of a monotonic clock; ``connected``: a
        worker is there. Raises ``Internal`` when it has lasted too long."""
        was_stuck, self._stuck = self._stuck, connected and core.stuck
        if not (was_stuck and self._stuck):
            self._silence.begin(now)
        elif self._silence.look(now):
            state = core.state
            raise Internal(
                f"{len(state.queue.requests)} requests are unfinished, {len(state.queue.waiting)} samples wait and"
                f" {state.pool.slots.running} run, and no plan was made for them for {self._silence.seconds:.0f} s"
                " (flag step_deadline)"
            )

    @property
    def reason(self) -> str:
        """Why requests should not come here; empty while they may."""
        if self._silence.seconds < self._deadline_s / 2:
            return ""
        return "requests are unfinished, and no plan is made for them"

    def until_look(self) -> float | None:
        """Seconds until ``look`` should be called again; None: not before something happens."""
        return self._silence.until_look() if self._stuck else None
