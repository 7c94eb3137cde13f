"""How long the worker has owed an answer, or the core a plan."""

_LOOK_S = 1.0  # between two looks, while one is owed


class Silence:
    """Counts from when the oldest unanswered plan could have begun: sent, and the one before it answered. It counts
    only while somebody listens: a scheduler that was stopped itself, or did not get the processor, does not blame its
    worker. Times are seconds of a monotonic clock. Owned by the step loop."""

    def __init__(self, deadline_s: float) -> None:
        self.seconds = 0.0
        self._deadline_s = deadline_s
        self._looked = 0.0

    def begin(self, now: float) -> None:
        """An answer came, or a plan went out and none was in flight."""
        self.seconds, self._looked = 0.0, now

    def look(self, now: float) -> bool:
        """Whether it has lasted too long. Asked about once a second while an answer is owed."""
        self.seconds += min(now - self._looked, 2 * _LOOK_S)
        self._looked = now
        return self.seconds >= self._deadline_s

    def until_look(self) -> float:
        """Seconds until ``look`` should be asked again."""
        return min(_LOOK_S, max(0.0, self._deadline_s - self.seconds))
