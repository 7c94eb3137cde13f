"""Where the time of the step loop's thread goes."""

import time

from services.scheduler.core.counters import Counters


class Stages:
    """A stage ends where its method is called, and began where the one before ended. Owned by the step loop."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._last = time.perf_counter_ns()

    def taken(self, waited_ns: int) -> None:
        """News were taken in, after waiting for them for so long in all."""
        self._counters.loop_wait_ns += waited_ns
        self._counters.loop_take_ns += self._lap() - waited_ns

    def planned(self) -> None:
        self._counters.loop_plan_ns += self._lap()

    def sent(self) -> None:
        self._counters.loop_send_ns += self._lap()

    def reported(self) -> None:
        self._counters.loop_report_ns += self._lap()

    def delivered(self) -> None:
        self._counters.loop_deliver_ns += self._lap()

    def _lap(self) -> int:
        last, self._last = self._last, time.perf_counter_ns()
        return self._last - last
