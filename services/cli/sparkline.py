"""A bar chart in one line of text."""

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], top: float | None = None) -> str:
    """Return a bar for each of ``values`` from 0 to ``top``, by default the largest value. A 0 is a blank."""
    highest = max(values, default=0.0) if top is None else top
    if highest <= 0:
        return " " * len(values)
    return "".join(_level(value / highest) for value in values)


def _level(share: float) -> str:
    return _LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)] if share > 0 else " "
