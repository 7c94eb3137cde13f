"""Decides which waiting samples may run now, so that the forecast stays within the pool at every step."""

from bisect import bisect_left

import numpy as np

from services.scheduler.core.future.forecast import Forecast
from services.scheduler.core.future.sequences import Sequences, growth, running_sequences
from services.scheduler.core.queue.lengths import MOST_CLASSES
from services.scheduler.core.state import State

PageForecast = tuple[tuple[int, int], ...]  # (steps from now, pages)
_FORECAST_STEPS = (1, 10, 100, 1000)  # for dashboards
_MOST_BEHIND = 32  # samples admitted in one plan past the first sample that does not fit


class AdmissionControl:
    """The admission rule for one plan, ``step``, while it is built.

    Guaranteed sequences count with their limits, and others with their predicted lengths. A margin of pages stays free
    for wrong predictions: a number of standard deviations of the total length of all predicted sequences.
    """

    def __init__(self, state: State, step: int, without: np.ndarray | None = None) -> None:
        """Make the rule for the sequences that run, except those in the slots ``without``."""
        self._state = state
        self._running = running_sequences(state.pool.slots, step, state.queue.steps_ahead, without)
        active = state.pool.slots.running_slots()
        if without is not None:
            active = np.setdiff1d(active, without, assume_unique=True)
        predicted = active[~state.pool.slots.guaranteed[active]]
        self._predicted = np.bincount(state.pool.slots.length_class[predicted], minlength=MOST_CLASSES)
        self._forecast: Forecast | None = None

    def select(self, candidates: Sequences, classes: np.ndarray) -> np.ndarray:
        """Return the indices of the candidates that may be admitted now: int64.

        These are the first candidates that fit together. The next candidate gets a reservation at the first step at
        which it fits, and later candidates are admitted if they leave it this reservation (backfilling, Lifka 1995).

        ``classes`` are those of the length predictor, int64, -1 = guaranteed.
        """
        count = self.fitting(candidates, classes)
        chosen = list(range(count))
        if count < len(classes) - 1 and len(self._running.length) + count:
            chosen += self._behind(candidates, classes, count)
        return np.array(chosen, np.int64)

    def fitting(self, candidates: Sequences, classes: np.ndarray) -> int:
        """Return how many of the first candidates fit, by bisection, as no candidate lowers the forecast."""

        def too_many(count: int) -> bool:
            return not self.fits(candidates.take(np.arange(count)), classes[:count])

        most = len(classes)
        return most if most == 0 or not too_many(most) else bisect_left(range(1, most), True, key=too_many)

    def _behind(self, candidates: Sequences, classes: np.ndarray, head: int) -> list[int]:
        """Return the candidates after ``head`` that fit beside all candidates before it and its reservation.

        A candidate counts with all its pages from the first step on, so the result is conservative.
        """
        limit, shape = int(self._limit(classes)), self._state.pool.shape
        curve = self.forecast_for(candidates).with_candidates(candidates.take(np.arange(head)))
        held = candidates.pages - candidates.left_behind
        largest = held + growth(candidates, shape.page_size)[1]
        if shape.window_tokens:
            within = np.minimum(largest, np.maximum(held, shape.window_pages))
            largest = np.where(candidates.lent > 0, largest, within)
        end = int(candidates.end[head])
        start = _first_gap(curve + largest[head] > limit, end)
        curve[start : start + end] += largest[head]
        room = np.minimum.accumulate(limit - curve)  # pages that are free from now through each step
        chosen = []
        for index in range(head + 1, len(classes)):
            end = len(room) if candidates.lent[index] else min(int(candidates.end[index]), len(room))
            if largest[index] <= room[end - 1]:
                chosen.append(index)
                room -= largest[index]  # also after its end, as it may end later
                if len(chosen) == _MOST_BEHIND:
                    break
        return chosen

    def fits(self, candidates: Sequences, classes: np.ndarray) -> bool:
        """Return whether the forecast stays within the pool if all ``candidates`` are admitted."""
        limit = self._limit(classes)
        if self._forecast is None and self._upper_bound(candidates) <= limit:
            return True
        return bool(self.forecast_for(candidates).with_candidates(candidates).max() <= limit)

    def _limit(self, classes: np.ndarray) -> float:
        """Return how many pages may be in use. A single sequence may use all."""
        state = self._state
        if len(self._running.length) + len(classes) <= 1:
            return state.pool.pages.size
        counts = self._predicted + np.bincount(classes[classes >= 0], minlength=MOST_CLASSES)
        return (
            state.pool.pages.size
            - state.policy.margin * state.queue.lengths.deviation(counts) / state.pool.shape.page_size
        )

    def _upper_bound(self, candidates: Sequences) -> int:
        """Return an upper bound on the forecast: all sequences and candidates at their greatest length together."""
        pool, tree, page_size = self._state.pool.pages, self._state.pool.tree, self._state.pool.shape.page_size
        # With windows, the nodes above a node with users may have none.
        unheld = (tree.users[candidates.node] == 0) | (self._state.pool.shape.window_tokens > 0)
        cached = sum(int(tree.depth[node]) for node in set(candidates.node[unheld].tolist()))
        grown = sum(int(growth(sequences, page_size)[1].sum()) for sequences in (self._running, candidates))
        return pool.in_use + cached + grown + int((candidates.pages - tree.depth[candidates.node]).sum())

    def forecast_for(self, candidates: Sequences) -> Forecast:
        """Return the forecast of the running sequences, up to the last end of ``candidates``. Cached."""
        horizon = int(max(self._running.end.max(initial=0), candidates.end.max(initial=0))) + 1
        if self._forecast is None or self._forecast.horizon < horizon:
            self._forecast = forecast_running(self._state, self._running, horizon)
        return self._forecast


def _first_gap(full: np.ndarray, length: int) -> int:
    """Return the first of ``length`` steps in a row that are not ``full``. All steps after the array are free."""
    edges = np.concatenate(([-1], np.flatnonzero(full), [len(full) + length]))
    return int(edges[np.argmax(np.diff(edges) > length)]) + 1


def forecast_running(state: State, running: Sequences, horizon: int) -> Forecast:
    """Return the forecast of the running sequences and the prompt shares, for ``horizon`` steps."""
    shares = [share for share in state.pool.sharing.values() if share.ready_step]
    extra = sum(share.owns_last_page for share in shares)
    nodes = [share.node for share in shares]
    pool = state.pool
    return Forecast(pool.shape, pool.slots, pool.tree, running, nodes, extra, horizon)


def running_curve(state: State, step: int) -> np.ndarray:
    """Return the pages in use from ``step`` until the last running sequence ends: int64."""
    running = running_sequences(state.pool.slots, step, state.queue.steps_ahead)
    return forecast_running(state, running, int(running.end.max(initial=0)) + 1).curve


def forecast_pages(state: State) -> PageForecast:
    """Return the pages in use at four future steps; empty without a worker. Takes 0.5 ms for 8,192 sequences."""
    if not state.attached:
        return ()
    running = running_sequences(state.pool.slots, state.pool.step, state.queue.steps_ahead)
    curve = forecast_running(state, running, _FORECAST_STEPS[-1] + 1).curve
    return tuple((steps, int(curve[steps])) for steps in _FORECAST_STEPS)
