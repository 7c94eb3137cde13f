"""Forecast of the end of a Batch job, from the rate of its last lines or of all lines so far."""

from collections.abc import Sequence
from typing import NamedTuple

RECENT_CHUNKS = 64
# Lines and seconds that are enough for a rate. The start is known to the second.
_MIN_LINES = 8
_MIN_S = 2


class BatchForecast(NamedTuple):
    """The expected end at the rate of ``lines_per_second``."""

    finish_at: int  # Unix time
    lines_per_second: float


def forecast(
    lines_left: int, recent: Sequence[tuple[int, float]], now: float, *, lines_done: int, began_at: float
) -> BatchForecast | None:
    """Return the forecast for ``lines_left``, or None if too few lines are done.

    ``recent`` has (lines, time of completion) of chunks, newest first. With fewer than two chunks, the rate is that of
    ``lines_done`` since ``began_at``. Otherwise the rate is measured from the completion of the oldest chunk, whose own
    lines do not count because their start is unknown. It is measured until now, so that the forecast of a stalled Batch
    job moves into the future.
    """
    if len(recent) > 1:
        lines, took = sum(count for count, _ in recent[:-1]), max(now, recent[0][1]) - recent[-1][1]
    elif lines_done >= _MIN_LINES and now - began_at >= _MIN_S:
        lines, took = lines_done, now - began_at
    else:
        return None
    rate = lines / max(took, 1e-3)
    return BatchForecast(int(now + lines_left / rate), round(rate, 2))
