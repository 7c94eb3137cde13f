"""Decides which waiting sequences may run now: as many as keep the whole curve of pages within the pool."""

import numpy as np

from services.scheduler.core.forecast import FAR, Forecast, Sequences, growth, running_sequences
from services.scheduler.core.lengths import MOST_CLASSES
from services.scheduler.core.state import State

_MOST_ROUNDS = 4  # bisections behind a head of the queue that does not fit


class Admission:
    """The future of the pool while the plan ``step`` is being built. Make one for each plan.

    Sequences that are guaranteed are counted to their limits, others to their predicted ends. What predictions fill
    leaves a margin: so many standard deviations of the lengths of all predicted sequences together, which is large as
    long as little is known about them.
    """

    def __init__(self, state: State, step: int) -> None:
        self._state = state
        self._running = running_sequences(state.slots, step)
        active = np.flatnonzero(state.slots.active)
        predicted = active[~state.slots.guaranteed[active]]
        self._predicted = np.bincount(state.slots.length_class[predicted], minlength=MOST_CLASSES)
        self._forecast: Forecast | None = None
        self._reserved: np.ndarray | int = 0  # curve of a head of the queue that waits for its place

    def select(self, candidates: Sequences, classes: np.ndarray, *, may_overtake: bool) -> np.ndarray:
        """Indices of the candidates that may be admitted now.

        All from the first on, as far as they fit together. Then, with ``may_overtake``, the first that does not fit
        gets its place in the future, and others are let in that leave it to it (backfilling: Lifka 1995).

        ``classes``: int64, of the length predictor, -1 = guaranteed.
        """
        chosen = np.arange(self._fitting(candidates, classes, np.zeros(0, np.int64), np.arange(len(classes))))
        behind = len(chosen)
        for attempt in range(_MOST_ROUNDS if may_overtake else 0):
            if behind >= len(classes) - 1:
                break
            if attempt == 0:
                self._reserve(candidates.take(chosen), candidates.take(np.array([behind])))
            further = np.arange(behind + 1, len(classes))
            count = self._fitting(candidates, classes, chosen, further)
            chosen = np.concatenate((chosen, further[:count]))
            behind += 1 + count
        return chosen

    def _fitting(self, candidates: Sequences, classes: np.ndarray, chosen: np.ndarray, further: np.ndarray) -> int:
        """How many of ``further`` fit beside ``chosen``. By bisection: each one more raises the curve or leaves it."""
        fits, fails, trial = 0, len(further) + 1, len(further)
        while fails - fits > 1:
            indices = np.concatenate((chosen, further[:trial]))
            if self.fits(candidates.take(indices), classes[indices]):
                fits = trial
            else:
                fails = trial
            trial = (fits + fails) // 2
        return fits

    def fits(self, candidates: Sequences, classes: np.ndarray) -> bool:
        """Whether the pool holds everything at every step with all of ``candidates`` in it."""
        limit = self._limit(classes)
        if self._forecast is None and self._at_most(candidates) <= limit:
            return True
        forecast = self._at_hand(candidates)
        curve = forecast.with_candidates(candidates)
        if isinstance(self._reserved, np.ndarray):
            curve = curve + self._reserved[: len(curve)]
        return bool(curve.max() <= limit)

    def _limit(self, classes: np.ndarray) -> float:
        """Pages that may be in use. A sequence that is alone may have them all."""
        state = self._state
        if len(self._running.length) + len(classes) <= 1:
            return state.pool.size
        counts = self._predicted + np.bincount(classes[classes >= 0], minlength=MOST_CLASSES)
        return state.pool.size - state.policy.margin * state.lengths.deviation(counts) / state.shape.page_size

    def _at_most(self, candidates: Sequences) -> int:
        """A bound on the peak: everything that runs and every candidate at its largest, all at once."""
        pool, tree, page_size = self._state.pool, self._state.tree, self._state.shape.page_size
        nodes = np.unique(candidates.node)
        unheld = int(tree.depth[nodes[tree.users[nodes] == 0]].sum())
        grown = sum(int(growth(sequences, page_size)[1].sum()) for sequences in (self._running, candidates))
        return pool.in_use + unheld + grown + int((candidates.pages - tree.depth[candidates.node]).sum())

    def _at_hand(self, candidates: Sequences) -> Forecast:
        """The forecast of what runs, made once, far enough for ``candidates``."""
        horizon = int(max(self._running.end.max(initial=0), candidates.end.max(initial=0))) + 1
        if self._forecast is None or self._forecast.horizon < horizon:
            self._forecast = forecast_running(self._state, self._running, horizon)
        return self._forecast

    def _reserve(self, chosen: Sequences, head: Sequences) -> None:
        """Find the step from which on ``head`` fits for good, and keep its pages free from there to its end."""
        state, page_size = self._state, self._state.shape.page_size
        self._forecast = forecast_running(state, self._running, self._at_hand(chosen).horizon + int(head.end[0]) + 1)
        curve = self._forecast.with_candidates(chosen)
        needed = int((head.pages - state.tree.depth[head.node] + growth(head, page_size)[1])[0])
        full = np.flatnonzero(curve + needed > state.pool.size)
        start = int(full[-1]) + 1 if len(full) else 0
        reserved = np.zeros(len(curve), np.int64)
        reserved[start : start + int(head.end[0])] = needed
        self._reserved = reserved


def forecast_running(state: State, running: Sequences, horizon: int) -> Forecast:
    """The forecast of what runs, shares of prompts included."""
    shares = [request.share for request in state.sharing if request.share.ready_step]
    extra = sum(share.owns_last_page for share in shares)
    nodes = [share.node for share in shares]
    return Forecast(state.pool, state.tree, running, nodes, extra, horizon)


def running_curve(state: State, step: int, horizon: int = 0) -> np.ndarray:
    """Pages in use by the running sequences from ``step`` on, until the last is gone, at least ``horizon`` steps."""
    running = running_sequences(state.slots, step)
    ends = running.end[running.end < FAR]
    return forecast_running(state, running, max(horizon, int(ends.max(initial=0)) + 1)).curve
