"""Measures steps and plans, and decides how many plans to keep in flight, and when to send the next one."""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from services.common.plan.result import Timing
from services.scheduler.engine.step_times import StepTimes

MOST_AHEAD = 16  # plans in flight, however short steps are
_RECENT = 0.2  # weight of the newest value in a smoothed value
# A result takes some time to the scheduler, and the next plan to the worker. Meanwhile the worker needs other work.
# The estimate of this time grows with every late plan, and shrinks with every other plan: 2 % of the plans are late.
_COVER_S, _LEAST_COVER_S, _MOST_COVER_S = 0.004, 0.001, 0.008
_LATE, _IN_TIME = 1.1, 0.998
_TOGETHER, _MOST_TOGETHER = 0.5, 4  # plans sent together: those of this part of the estimate, and most of them
_KEPT = 0.8  # the limit of plans is not reduced to this part of it or more
# A plan was late if the device was idle for this time and no plan was queued.
_LATE_NS = 50_000
# Growth of the shortest step with each result, so that a short step raises the limit of plans for about 100 steps. The
# limit costs nothing if plans are sent late, and a core with few free pages refuses to raise it again.
_GROWTH = 1.01
# Plans behind a step of at least this duration are sent late on request: before this part of the step remains.
_LONG_STEP_S = 0.02
_LEAD = 0.25


class Pace:
    """Durations of steps and plans, in seconds of a monotonic clock. Used by the step loop.

    A plan is full if it was built with admission, even if no sample was admitted, and otherwise light.
    """

    def __init__(self) -> None:
        self.step_s = 0.0  # smoothed duration of a step; 0 if unknown
        self._full, self._light = _Kind(), _Kind()
        self.times = StepTimes()
        self._sent: deque[_Sent] = deque()  # plans in flight
        self._last_answer = 0.0
        self._lead = 0.0
        self._cover_s = _COVER_S  # work that the worker needs when the next plan is sent
        self._timed = False  # results have times of the device
        self._shortest_s = math.inf  # shortest expected step of those sent recently
        self._least = 1  # plans in flight that the operator wants

    def begin(self, lead: float = 0.0) -> None:
        """Reset the state for a new worker.

        ``lead`` is the number of steps by which the first pipeline stage is ahead of the last stage, which returns
        results. This number of further plans must be in flight, or the first stage would wait.
        """
        self._sent.clear()
        self._lead, self._cover_s, self._timed, self._shortest_s = lead, _COVER_S, False, math.inf

    def sent(self, now: float, build_s: float, *, full: bool, tokens: int = 0, follows: bool = True) -> None:
        """Record a plan of ``tokens`` tokens that took ``build_s`` seconds to build.

        ``follows``: there has been work for the device since the plan before.
        """
        kind = self._full if full else self._light
        kind.plan_s = _smooth(kind.plan_s, build_s)
        self._sent.append(_Sent(now, kind, tokens, follows))
        self._shortest_s = min(self._shortest_s, self.times.expected_s(tokens) or math.inf)

    def result_received(self, at: float, timing: Timing | None = None) -> None:
        """Record the result of the oldest plan in flight, received ``at`` this time.

        If ``timing`` has no time of the device, the worker is assumed to have started the plan when it was sent, or
        when the plan before was done.
        """
        sent, kind, tokens, follows = self._sent.popleft()
        step_s = max(at - max(sent, self._last_answer), 0.0)
        self._timed = timing is not None and timing.device > 0 and not self._lead
        if timing is not None and self._timed:
            # A device that is idle while the plan is queued waits for the host, which then limits the rate of steps.
            step_s = (timing.device + timing.idle - timing.late) * 1e-9
            if follows:  # otherwise no plan could have been sent earlier
                cover_s = self._cover_s * (_LATE if timing.late > _LATE_NS else _IN_TIME)
                self._cover_s = min(max(cover_s, _LEAST_COVER_S), max(_MOST_COVER_S, self._least * self.step_s))
        self.step_s, kind.step_s = _smooth(self.step_s, step_s), _smooth(kind.step_s, step_s)
        self._last_answer, self._shortest_s = at, self._shortest_s * _GROWTH
        if tokens:
            self.times.note(tokens, step_s)

    def until_needed(self, now: float, *, hold_long: bool) -> float:
        """Return the seconds until the worker needs its next plan, or 0 if this is unknown.

        A request that arrives before the plan is built is included in it. If ``hold_long`` is false, a plan behind a
        long step is needed at once. So is a plan behind a short step that the worker does not measure.
        """
        if self._lead or not self._sent:
            return 0.0
        expected = [self.times.expected_s(each.tokens) for each in self._sent]
        if expected[0] is None or not (hold_long if expected[0] >= _LONG_STEP_S else self._timed):
            return 0.0
        began = max(self._sent[0].at, self._last_answer)
        left = sum(each or 0.0 for each in expected) - (now - began)
        margin = max(2 * self._full.plan_s, self._cover_s)
        return max(0.0, left - max(margin, _LEAD * expected[0] if expected[0] >= _LONG_STEP_S else 0.0))

    def plans_ahead(self, now: int, least: int, most: int) -> int:
        """Return the most plans to keep in flight, from ``least`` to ``most``. ``now`` is the current number.

        There must be enough that short steps do not wait for plans: those that cover the way of a plan, and those that
        are sent ``together``. Each further plan wastes a row of every sequence that finishes. A small reduction is not
        worth the change.
        """
        self._least = least = min(math.ceil(least + self._lead), most)
        if not self.step_s:
            return max(least, min(now, most))
        steps = (1 + _TOGETHER) * self._cover_s / self._short_step_s if self._timed else self._cover_s / self.step_s
        wanted = max(least, min(math.ceil(steps + self._lead), most))
        return now if least < wanted < now and wanted >= _KEPT * now else wanted

    @property
    def together(self) -> int:
        """The number of plans to send together: those of half the work that covers the way of a plan.

        A message takes time of several threads of both services, which can be longer than a short step. A request that
        arrives after the plans were built waits for their steps.
        """
        if not self._timed:
            return 1
        return max(1, min(int(_TOGETHER * self._cover_s / self._short_step_s), _MOST_TOGETHER))

    @property
    def _short_step_s(self) -> float:
        return min(self.step_s, self._shortest_s)

    def is_starving(self, now: float, most_in_flight: int) -> bool:
        """Return whether the worker would become idle before a full plan arrives, and light plans avoid that.

        They do not help if they are hardly faster to build, or if one plan at most is in flight, since then the worker
        waits for every plan. Nor do they help if the step of a full plan lasts longer than building the next plan. Then
        one full plan makes up the delay, while the shorter steps of light plans would prolong it.
        """
        full, light = self._full, self._light
        if most_in_flight == 1 or not self.step_s or light.plan_s * 2 > full.plan_s or full.step_s > full.plan_s:
            return False
        began = max(self._sent[0].at, self._last_answer) if self._sent else now
        left = sum(each.kind.step_s or self.step_s for each in self._sent) - (now - began)
        return left - self._lead * self.step_s < full.plan_s


@dataclass(slots=True, eq=False)
class _Kind:
    """Smoothed durations for one kind of plan. 0 if unknown."""

    plan_s: float = 0.0  # time to build and send it
    step_s: float = 0.0  # duration of its step


class _Sent(NamedTuple):
    """A plan in flight."""

    at: float
    kind: _Kind
    tokens: int
    follows: bool


def _smooth(old: float, new: float) -> float:
    return new if not old else (1 - _RECENT) * old + _RECENT * new
