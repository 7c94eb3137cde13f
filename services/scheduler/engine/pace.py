"""How fast the worker steps and how long plans take; and so, how many to send, and whether it is about to run dry."""

import math
from collections import deque

from services.scheduler.engine.step_times import StepTimes

MOST_AHEAD = 16  # plans in flight, however short steps are
_RECENT = 0.2  # weight of the newest figure in a smoothed one
# A plan takes one to two milliseconds from here to the worker and back: so much work lies ahead of the worker at least.
_COVER_S = 0.004
# Plans for steps of at least so many seconds may be sent late: this part of the step before it ends, or earlier.
_LONG_STEP_S = 0.02
_LEAD = 0.25


class Pace:
    """Times are seconds of a monotonic clock. Owned by the step loop.

    A plan is full if samples could be admitted by it, and light otherwise.
    """

    def __init__(self) -> None:
        self.step_s = 0.0  # recent time of a step on the worker; 0 = none yet
        self._full, self._light = _Kind(), _Kind()
        self.times = StepTimes()
        self._sent: deque[tuple[float, _Kind, int]] = deque()  # plans that the worker has not answered: with tokens
        self._last_answer = 0.0
        self._lead = 0.0

    def begin(self, lead: float = 0.0) -> None:
        """Another worker: none of its plans are in flight. ``lead``: steps by which its first pipeline stage is before
        the last, which answers; for the first to find a plan when it needs one, so many more must be in flight."""
        self._sent.clear()
        self._lead = lead

    def sent(self, now: float, took_s: float, *, full: bool, tokens: int = 0) -> None:
        """Note that a plan of ``tokens`` tokens was sent, which took ``took_s`` to build."""
        kind = self._full if full else self._light
        kind.plan_s = _smooth(kind.plan_s, took_s)
        self._sent.append((now, kind, tokens))

    def answered(self, at: float) -> None:
        """The answer to the oldest plan in flight came ``at`` this time, however long it lay here since. The worker
        began the plan when it got it, or when the one before was through."""
        sent, kind, tokens = self._sent.popleft()
        step_s = max(at - max(sent, self._last_answer), 0.0)
        self.step_s, kind.step_s = _smooth(self.step_s, step_s), _smooth(kind.step_s, step_s)
        self._last_answer = at
        if tokens:
            self.times.note(tokens, step_s)

    def until_needed(self, now: float) -> float:
        """Return the seconds until the worker needs its next plan. 0 if that is not known, or if steps are short.

        A request that arrives before the plan is built does not wait for the step after it.
        """
        if self._lead or not self._sent:
            return 0.0
        expected = [self.times.expected_s(tokens) for _, _, tokens in self._sent]
        if expected[0] is None or expected[0] < _LONG_STEP_S:
            return 0.0
        began = max(self._sent[0][0], self._last_answer)
        left = sum(each or 0.0 for each in expected) - (now - began)
        return max(0.0, left - max(_LEAD * expected[0], 2 * self._full.plan_s, _COVER_S))

    def plans_ahead(self, now: int, least: int, most: int) -> int:
        """How many plans should be in flight, from ``least`` to ``most``, when ``now`` may be: enough that short steps
        do not wait for their plans, and no more, since a sequence that ends wastes a row of each. One less than there
        are now is not worth a change."""
        least = min(math.ceil(least + self._lead), most)
        if not self.step_s:
            return max(least, min(now, most))
        wanted = max(least, min(math.ceil(_COVER_S / self.step_s + self._lead), most))
        return now if least < wanted == now - 1 else wanted

    def runs_dry(self, now: float, most_in_flight: int) -> bool:
        """Whether the worker would be through with what it holds before a full plan could reach it, and light ones
        help.

        They do not where they are hardly faster to build, nor where one plan at most is in flight, since then the
        worker waits for every plan anyway. Nor where a full plan keeps the worker for longer than the next one takes to
        build: one full plan and nobody is late any more, but light ones, which keep it for less, would all be.
        """
        full, light = self._full, self._light
        if most_in_flight == 1 or not self.step_s or light.plan_s * 2 > full.plan_s or full.step_s > full.plan_s:
            return False
        began = max(self._sent[0][0], self._last_answer) if self._sent else now
        left = sum(kind.step_s or self.step_s for _, kind, _ in self._sent) - (now - began)
        return left - self._lead * self.step_s < full.plan_s


class _Kind:
    """Recent times of one kind of plan; 0 = none yet."""

    __slots__ = ("plan_s", "step_s")

    def __init__(self) -> None:
        self.plan_s = 0.0  # of building and sending it
        self.step_s = 0.0  # of its step on the worker


def _smooth(old: float, new: float) -> float:
    return new if not old else (1 - _RECENT) * old + _RECENT * new
