"""When a batch will be done, from how fast its last lines were."""

from collections.abc import Sequence
from typing import NamedTuple

RECENT_CHUNKS = 64


class Forecast(NamedTuple):
    """By the rate of ``lines_per_second``."""

    finish_at: int  # Unix time
    lines_per_second: float


def forecast(lines_left: int, recent: Sequence[tuple[int, float]], now: float) -> Forecast | None:
    """``recent``: (lines, when they were done) of chunks, the last first; None while they are too few to tell.

    The oldest only says since when: its own lines began at an unknown time. Time since the last chunk counts, so that
    the forecast of a batch that stands still moves away.
    """
    if len(recent) < 2:
        return None
    took = max(now, recent[0][1]) - recent[-1][1]
    lines = sum(count for count, _ in recent[:-1])
    rate = lines / max(took, 1e-3)
    return Forecast(int(now + lines_left / rate), round(rate, 2))
