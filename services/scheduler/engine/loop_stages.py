"""Measures how the step loop's thread spends its time."""

import time

from services.scheduler.core.counters import Counters


class LoopStages:
    """Timer of the loop's stages. Each method ends a stage, which began at the end of the stage before.

    Used by the step loop.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._last = time.perf_counter_ns()

    def taken(self, waited_ns: int) -> None:
        """End the stage that waits for calls and runs them. ``waited_ns`` is the time of waiting."""
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
