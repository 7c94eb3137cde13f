"""Decides whether one more sequence fits, in ``guaranteed`` mode: until every sequence has reached its limit."""

from collections.abc import Collection

import numpy as np

from services.scheduler.core.forecast import Candidate, Growth, candidate_curve, growth, page_curve
from services.scheduler.core.pages import FAR, PagePool
from services.scheduler.core.slots import Slots


class Admission:
    """The future of the pool while the plan ``step`` is being built. Make one for each plan.

    Ask in the order of the queue, and apply what was admitted (slot and pages) before asking again. The exact curve is
    computed only when the sum of all limits, the worst that could happen, does not fit.
    """

    def __init__(self, pool: PagePool, slots: Slots, step: int, lasting: Collection[np.ndarray] = ()) -> None:
        self._pool = pool
        self._slots = slots
        self._step = step
        self._lasting = lasting  # a live view
        self._curve: np.ndarray | None = None
        self._since: list[Candidate] = []  # admitted since the curve was computed
        self._most = pool.in_use + int(running_growth(pool, slots, step).count.sum())

    def settle_ends(self) -> None:
        """Make the ends of pages exact: call it before a candidate that would hold pages in use is worked out."""
        if self._pool.ends_stale:
            _restore_ends(self._pool, self._slots, self._lasting)

    def admit(self, candidate: Candidate) -> bool:
        """True when the pool holds everything at every step with the candidate in it."""
        if self._most + candidate.peak <= self._pool.size:
            self._most += candidate.peak
            self._since.append(candidate)
            return True
        curve = self._present_curve(candidate.end + 1)
        curve = curve + candidate_curve(candidate, self._pool.page_size, len(curve))
        if curve.max() > self._pool.size:
            return False
        self._curve, self._most = curve, int(curve.max())
        return True

    def _present_curve(self, horizon: int) -> np.ndarray:
        """The curve with everything admitted so far: from the state itself at first, then kept up to date."""
        page_size, curve = self._pool.page_size, self._curve
        if curve is None:
            curve = running_curve(self._pool, self._slots, self._step, self._lasting, horizon)
        else:
            curve = np.concatenate((curve, np.full(max(0, horizon - len(curve)), curve[-1])))
            for admitted in self._since:
                curve = curve + candidate_curve(admitted, page_size, len(curve))
        self._curve, self._since, self._most = curve, [], int(curve.max())
        return curve


def running_growth(pool: PagePool, slots: Slots, step: int) -> Growth:
    """Growth of all running sequences."""
    active = np.flatnonzero(slots.active)
    length = np.maximum(slots.scheduled[active], slots.given[active])
    end = slots.end_step[active] - step
    return growth(length, slots.limit[active], slots.page_count[active], end, slots.delay[active], pool.page_size)


def running_curve(
    pool: PagePool, slots: Slots, step: int, lasting: Collection[np.ndarray] = (), horizon: int = 0
) -> np.ndarray:
    """Pages in use by the running sequences from ``step`` on, until the last is gone, at least ``horizon`` steps.

    ``lasting``: pages held by something else than a sequence.
    """
    if pool.ends_stale:
        _restore_ends(pool, slots, lasting)
    growing = running_growth(pool, slots, step)
    ends = pool.ends[pool.refs > 0] - step
    horizon = max(horizon, int(growing.end.max(initial=0)) + 1)
    return page_curve(pool.in_use, ends, growing, pool.page_size, horizon)


def _restore_ends(pool: PagePool, slots: Slots, lasting: Collection[np.ndarray]) -> None:
    active = np.flatnonzero(slots.active)
    counts = slots.page_count[active]
    held = np.arange(counts.max(initial=0)) < counts[:, None]
    pages = [slots.table[active][:, : held.shape[1]][held], *lasting]
    ends = [np.repeat(slots.end_step[active], counts), *(np.full(len(group), FAR) for group in lasting)]
    pool.restore_ends(np.concatenate(pages), np.concatenate(ends))
