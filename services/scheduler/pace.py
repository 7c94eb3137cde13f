"""How fast the worker steps and how long plans take; and so, how many to send, and whether it is about to run dry."""

import math
from collections import deque

MOST_AHEAD = 16  # plans in flight, however short steps are
_RECENT = 0.2  # weight of the newest figure in a smoothed one
# A plan takes one to two milliseconds from here to the worker and back: so much work lies ahead of the worker at least.
_COVER_S = 0.004


class Pace:
    """Times are seconds of a monotonic clock. Owned by the step loop."""

    def __init__(self) -> None:
        self.step_s = 0.0  # recent time of a step on the worker; 0 = none yet
        self._full_s = 0.0  # recent time of building and sending a plan with onboarding
        self._light_s = 0.0  # and of one without
        self._sent: deque[float] = deque()  # plans that the worker has not answered
        self._last_answer = 0.0

    def forget(self) -> None:
        """Another worker: none of its plans are in flight."""
        self._sent.clear()

    def sent(self, now: float, took_s: float, *, full: bool) -> None:
        """A plan went out that took ``took_s`` to build. ``full``: with onboarding, though perhaps of nobody."""
        self._sent.append(now)
        if full:
            self._full_s = _smooth(self._full_s, took_s)
        else:
            self._light_s = _smooth(self._light_s, took_s)

    def answered(self, at: float) -> None:
        """The answer to the oldest plan in flight came ``at`` this time, however long it lay here since. The worker
        began the plan when it got it, or when the one before was through."""
        began = max(self._sent.popleft(), self._last_answer)
        self.step_s = _smooth(self.step_s, max(at - began, 0.0))
        self._last_answer = at

    def plans_ahead(self, now: int, least: int, most: int) -> int:
        """How many plans should be in flight, from ``least`` to ``most``, when ``now`` may be: enough that short steps
        do not wait for their plans, and no more, since a sequence that ends wastes a row of each. One less than there
        are now is not worth a change."""
        if not self.step_s:
            return max(least, min(now, most))
        wanted = max(least, min(math.ceil(_COVER_S / self.step_s), most))
        return now if least < wanted == now - 1 else wanted

    def runs_dry(self, now: float, most_in_flight: int) -> bool:
        """Whether the worker would be through with what it holds before a full plan could reach it, and a light one is
        so much faster that it helps. Where one plan at most is in flight the worker waits for every plan anyway."""
        if most_in_flight == 1 or not self.step_s or self._light_s * 2 > self._full_s:
            return False
        began = max(self._sent[0], self._last_answer) if self._sent else now
        return len(self._sent) * self.step_s - (now - began) < self._full_s


def _smooth(old: float, new: float) -> float:
    return new if not old else (1 - _RECENT) * old + _RECENT * new
