"""Schedules reports of the load: to streams a few times a second, to the log and statsd at their period."""

import structlog

from services.scheduler.engine.statsd import Statsd
from tokasaurus.scheduler.v1 import observe_pb2

log = structlog.get_logger(__name__)

_LOAD_PERIOD_S = 0.2
_FORECAST_PERIOD_S = 1.0


class Stats:
    """Report times, in seconds of a monotonic clock. Used by the step loop.

    It stores the counters of the last log line, because a line reports their changes.
    """

    def __init__(self, line_period_s: float, now: float, statsd: Statsd | None = None) -> None:
        """``line_period_s`` is the period of log lines and statsd. 0 means no log lines."""
        self.changed = False  # an event occurred since the last load report
        self._line_period_s = line_period_s
        self._last_load = self._last_line = self._last_forecast = self._last_sent = now
        self._statsd = statsd
        self._last_counts = (0, 0, 0, 0)

    def due(self, *, busy: bool) -> float | None:
        """Return the time of the next report."""
        load = self._last_load + _LOAD_PERIOD_S if self.changed else None
        line = self._last_line + self._line_period_s if self._line_period_s and busy else None
        sent = self._last_sent + self._line_period_s if self._statsd is not None else None
        return min((at for at in (load, line, sent) if at is not None), default=None)

    def load_is_due(self, now: float) -> bool:
        """Return whether to send the load to streams. If so, record it as sent."""
        if not self.changed or now - self._last_load < _LOAD_PERIOD_S:
            return False
        self.changed, self._last_load = False, now
        return True

    def forecast_is_due(self, now: float, *, running: bool) -> bool:
        """Return whether a load needs a new forecast. If so, record it as made.

        Without ``running`` sequences a forecast is cheap, and there may be no further load.
        """
        if running and now - self._last_forecast < _FORECAST_PERIOD_S:
            return False
        self._last_forecast = now
        return True

    def line_is_due(self, now: float) -> bool:
        return bool(self._line_period_s) and now - self._last_line >= self._line_period_s

    def due_statsd(self, now: float) -> Statsd | None:
        """Return the statsd client if a report is due, also for an idle scheduler, and record it as sent."""
        if self._statsd is None or now - self._last_sent < self._line_period_s:
            return None
        self._last_sent = now
        return self._statsd

    def log(self, load: observe_pb2.Load, now: float, step_s: float, plans_ahead: int) -> None:
        """Log the load. ``step_s`` is the duration of a step, ``plans_ahead`` the limit of plans in flight."""
        counters, passed_s = load.counters, now - self._last_line
        counts = (counters.generated_tokens, counters.steps, counters.device_busy_ns, counters.device_idle_ns)
        tokens, steps, busy, idle = (new - old for new, old in zip(counts, self._last_counts, strict=True))
        self._last_counts, self._last_line = counts, now
        log.info(
            "load",
            running=load.running_sequences,
            waiting=load.waiting_sequences,
            pages_in_use=f"{load.in_use_pages}/{load.total_pages}",
            tokens_per_second=round(tokens / passed_s),
            steps_per_second=round(steps / passed_s, 1),
            step_ms=round(step_s * 1000, 2),
            plans_ahead=plans_ahead,
            device_idle=f"{idle / (busy + idle):.1%}" if busy else "not measured",
        )
