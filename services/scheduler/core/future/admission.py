"""Decides which waiting sequences may run now: as many as keep the whole curve of pages within the pool."""

import numpy as np

from services.scheduler.core.future.forecast import Forecast, Sequences, growth, running_sequences
from services.scheduler.core.queue.lengths import MOST_CLASSES
from services.scheduler.core.state import State

_MOST_BEHIND = 32  # samples let in at once behind a head of the queue that does not fit


class Admission:
    """The future of the pool while the plan ``step`` is being built. Make one for each plan.

    Sequences that are guaranteed are counted to their limits, others to their predicted ends. What predictions fill
    leaves a margin: so many standard deviations of the lengths of all predicted sequences together, which is large as
    long as little is known about them.
    """

    def __init__(self, state: State, step: int, without: np.ndarray | None = None) -> None:
        """``without``: slots taken to be given up before."""
        self._state = state
        self._running = running_sequences(state.pool.slots, step, without)
        active = state.pool.slots.running_slots()
        if without is not None:
            active = np.setdiff1d(active, without, assume_unique=True)
        predicted = active[~state.pool.slots.guaranteed[active]]
        self._predicted = np.bincount(state.pool.slots.length_class[predicted], minlength=MOST_CLASSES)
        self._forecast: Forecast | None = None

    def select(self, candidates: Sequences, classes: np.ndarray) -> np.ndarray:
        """Indices of the candidates that may be admitted now.

        All from the first on, as far as they fit together. Then the first that does not fit gets its place in the
        future, and others are let in that leave it to it (backfilling: Lifka 1995).

        ``classes``: int64, of the length predictor, -1 = guaranteed.
        """
        count = self.fitting(candidates, classes)
        chosen = list(range(count))
        if count < len(classes) - 1 and len(self._running.length) + count:
            chosen += self._behind(candidates, classes, count)
        return np.array(chosen, np.int64)

    def fitting(self, candidates: Sequences, classes: np.ndarray) -> int:
        """How many from the first on fit. By bisection: each one more raises the curve or leaves it."""
        fits, fails, trial = 0, len(classes) + 1, len(classes)
        while fails - fits > 1:
            first = np.arange(trial)
            if self.fits(candidates.take(first), classes[first]):
                fits = trial
            else:
                fails = trial
            trial = (fits + fails) // 2
        return fits

    def _behind(self, candidates: Sequences, classes: np.ndarray, head: int) -> list[int]:
        """Those behind ``head``, who waits, that fit from now to their ends beside all before it and its own place.

        A candidate counts with all its pages from the first step on, so this admits somewhat less than could be.
        """
        limit, page_size = int(self._limit(classes)), self._state.pool.shape.page_size
        curve = self._at_hand(candidates).with_candidates(candidates.take(np.arange(head)))
        largest = candidates.pages + growth(candidates, page_size)[1]
        end = int(candidates.end[head])
        start = _first_gap(curve + largest[head] > limit, end)
        curve[start : start + end] += largest[head]
        room = np.minimum.accumulate(limit - curve)  # until each step
        chosen = []
        for index in range(head + 1, len(classes)):
            end = len(room) if candidates.lent[index] else min(int(candidates.end[index]), len(room))
            if largest[index] <= room[end - 1]:
                chosen.append(index)
                room -= largest[index]  # also behind its end: it may be late
                if len(chosen) == _MOST_BEHIND:
                    break
        return chosen

    def fits(self, candidates: Sequences, classes: np.ndarray) -> bool:
        """Whether the pool holds everything at every step with all of ``candidates`` in it."""
        limit = self._limit(classes)
        if self._forecast is None and self._at_most(candidates) <= limit:
            return True
        return bool(self._at_hand(candidates).with_candidates(candidates).max() <= limit)

    def _limit(self, classes: np.ndarray) -> float:
        """Pages that may be in use. A sequence that is alone may have them all."""
        state = self._state
        if len(self._running.length) + len(classes) <= 1:
            return state.pool.pages.size
        counts = self._predicted + np.bincount(classes[classes >= 0], minlength=MOST_CLASSES)
        return (
            state.pool.pages.size
            - state.policy.margin * state.queue.lengths.deviation(counts) / state.pool.shape.page_size
        )

    def _at_most(self, candidates: Sequences) -> int:
        """A bound on the peak: everything that runs and every candidate at its largest, all at once."""
        pool, tree, page_size = self._state.pool.pages, self._state.pool.tree, self._state.pool.shape.page_size
        unheld = set(candidates.node[tree.users[candidates.node] == 0].tolist())
        cached = sum(int(tree.depth[node]) for node in unheld)
        grown = sum(int(growth(sequences, page_size)[1].sum()) for sequences in (self._running, candidates))
        return pool.in_use + cached + grown + int((candidates.pages - tree.depth[candidates.node]).sum())

    def _at_hand(self, candidates: Sequences) -> Forecast:
        """The forecast of what runs, made once, far enough for ``candidates``."""
        horizon = int(max(self._running.end.max(initial=0), candidates.end.max(initial=0))) + 1
        if self._forecast is None or self._forecast.horizon < horizon:
            self._forecast = forecast_running(self._state, self._running, horizon)
        return self._forecast


def _first_gap(full: np.ndarray, length: int) -> int:
    """The first step of ``length`` in a row that are not ``full``; all are free behind the last."""
    edges = np.concatenate(([-1], np.flatnonzero(full), [len(full) + length]))
    return int(edges[np.argmax(np.diff(edges) > length)]) + 1


def forecast_running(state: State, running: Sequences, horizon: int) -> Forecast:
    """The forecast of what runs, shares of prompts included."""
    shares = [share for share in state.pool.sharing.values() if share.ready_step]
    extra = sum(share.owns_last_page for share in shares)
    nodes = [share.node for share in shares]
    return Forecast(state.pool.pages, state.pool.tree, running, nodes, extra, horizon)


def running_curve(state: State, step: int) -> np.ndarray:
    """Pages in use by the running sequences from ``step`` on, until the last is gone."""
    running = running_sequences(state.pool.slots, step)
    return forecast_running(state, running, int(running.end.max(initial=0)) + 1).curve
