"""Figures as a line of text: one character each, the higher the fuller."""

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], top: float | None = None) -> str:
    """One character for each value between 0 and ``top``, by default the largest of them; a blank for 0."""
    highest = max(values, default=0.0) if top is None else top
    if highest <= 0:
        return " " * len(values)
    return "".join(_level(value / highest) for value in values)


def _level(share: float) -> str:
    return _LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)] if share > 0 else " "
