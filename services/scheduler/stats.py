"""The line that a busy scheduler logs now and then."""

import structlog

from services.scheduler.core.load import Load

log = structlog.get_logger(__name__)


class StatsLog:
    """Remembers the counters of the line before: a line tells what happened since. Owned by the step loop."""

    def __init__(self) -> None:
        self._last = (0, 0, 0, 0)

    def log(self, load: Load, passed_s: float, step_s: float, plans_ahead: int) -> None:
        """``passed_s``: since the line before; ``step_s``: recent time of a step; ``plans_ahead``: allowed now."""
        counters = load.counters
        counts = (counters.generated_tokens, counters.steps, counters.device_busy_ns, counters.device_idle_ns)
        tokens, steps, busy, idle = (new - old for new, old in zip(counts, self._last, strict=True))
        self._last = counts
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
