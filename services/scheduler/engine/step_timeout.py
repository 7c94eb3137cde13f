"""Timeout of the step loop for an overdue result or plan."""

_CHECK_S = 1.0  # interval of checks while a result is overdue


class StepTimeout:
    """Timeout of the worker's next result, in seconds of a monotonic clock. Used by the step loop.

    It starts when the oldest plan in flight could have begun: when it was sent, and the plan before it had its result.
    Only time during which the scheduler itself was running counts, so a scheduler that was suspended does not blame its
    worker.
    """

    def __init__(self, deadline_s: float) -> None:
        self.seconds = 0.0
        self._deadline_s = deadline_s
        self._checked = 0.0

    def restart(self, now: float) -> None:
        """Restart the timeout: a result arrived, or a plan was sent when none was in flight."""
        self.seconds, self._checked = 0.0, now

    def check(self, now: float) -> bool:
        """Return whether the timeout has expired. Call it about once a second while a result is expected."""
        self.seconds += min(now - self._checked, 2 * _CHECK_S)
        self._checked = now
        return self.seconds >= self._deadline_s

    def until_check(self) -> float:
        """Return the seconds until the next ``check``."""
        return min(_CHECK_S, max(0.0, self._deadline_s - self.seconds))
