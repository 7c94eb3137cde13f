"""When a batch will be done, from how fast its last lines were, or all so far."""

from collections.abc import Sequence
from typing import NamedTuple

RECENT_CHUNKS = 64
# So many lines, in so long, tell something. Their beginning is known to the second.
_ENOUGH_LINES = 8
_ENOUGH_S = 2


class Forecast(NamedTuple):
    """By the rate of ``lines_per_second``."""

    finish_at: int  # Unix time
    lines_per_second: float


def forecast(
    lines_left: int, recent: Sequence[tuple[int, float]], now: float, *, lines_done: int, began_at: float
) -> Forecast | None:
    """``recent``: (lines, when they were done) of chunks, the last first. Before there are two, what counts is how long
    ``lines_done`` took since ``began_at``; None while that tells too little.

    The oldest chunk only says since when: its own lines began at an unknown time. Time since the last one counts, so
    that the forecast of a batch that stands still moves away.
    """
    if len(recent) > 1:
        lines, took = sum(count for count, _ in recent[:-1]), max(now, recent[0][1]) - recent[-1][1]
    elif lines_done >= _ENOUGH_LINES and now - began_at >= _ENOUGH_S:
        lines, took = lines_done, now - began_at
    else:
        return None
    rate = lines / max(took, 1e-3)
    return Forecast(int(now + lines_left / rate), round(rate, 2))
