"""Shares the time of the device between keys whose demands differ: keys of small demand have steps of their own.

A step lasts as long as all of its tokens need. A key that computes one token in each step would be slowed down by the
prompts of another key, though it uses less than its share. So while some keys want much less of a step than others,
most plans hold the others back: their sequences keep slots and pages, and compute nothing. Both sides get the same
time: a plan with everything in it earns the time that plans of the small demands spend afterwards. A plan costs its
tokens and the fixed cost of a step, ``Queue.step_cost``.

Steps with few tokens use the device badly. So a key has steps of its own only if it was served less than half of its
fair share lately, or if it is through in a moment: busy keys whose demands go up and down share full steps.

Sequences that are held back end one step later. Where the forecast says that the pool could then be too small, nothing
is held back. With one key there is nothing to share, and this module does nothing.
"""

from typing import NamedTuple

import numpy as np

from services.scheduler.core.future.admission import forecast_running
from services.scheduler.core.future.forecast import running_sequences
from services.scheduler.core.state import State

_SHORTER = 1.5  # a step that is not shorter by this factor is not worth a plan
_SOON = 2.0  # a key whose work is at most this multiple of a step's fixed cost is through in a moment


class TimeSlice(NamedTuple):
    """Which keys a plan computes tokens for."""

    keys: frozenset[str]  # whose waiting samples may be admitted
    held: np.ndarray  # bool ``[slots]``: they compute nothing in this plan


class TimeSharing:
    """Chooses which keys a plan serves. Owned by the core, for as long as one worker is attached."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._credit = 0.0  # what plans with everything cost that small demands have not spent since

    def next(self) -> TimeSlice | None:
        """Return which keys the plan that is built now serves, or None for all keys."""
        state = self._state
        most = state.queue.step_cost + state.pool.shape.max_tokens_per_step
        if state.queue.on_trial is not None or not state.several_keys:
            self._credit = most
            return None
        demands = self._demands()
        behind, soon = state.queue.recent.behind(demand.key for demand in demands), _SOON * state.queue.step_cost
        demands = [demand._replace(may=demand.left <= soon or demand.key in behind) for demand in demands]
        whole = state.queue.step_cost + min(
            sum(demand.tokens for demand in demands), state.pool.shape.max_tokens_per_step
        )
        small = _small(demands, state.queue.step_cost, whole)
        cost = state.queue.step_cost + sum(demand.tokens for demand in small)
        if not small:
            self._credit = whole
            return None
        if self._credit < cost or (held := self._hold(demands, small)) is None:
            self._credit = min(self._credit + whole, most)
            return None
        self._credit -= cost
        return TimeSlice(frozenset(demand.key for demand in small), held)

    def begin(self, time_slice: TimeSlice) -> None:
        """Postpone the ends of the sequences that are held back."""
        self._state.pool.slots.end_step[time_slice.held] += 1

    def undo(self, time_slice: TimeSlice) -> None:
        """Take ``begin`` back: the plan would have been empty."""
        self._state.pool.slots.end_step[time_slice.held] -= 1

    def _demands(self) -> list["_Demand"]:
        """Return what each key could compute now."""
        state, slots = self._state, self._state.pool.slots
        running, most = slots.running_slots(), state.pool.shape.max_tokens_per_step
        tokens = np.bincount(
            slots.key[running], weights=_wanted(state, running), minlength=state.pool.running_keys.size
        )
        left = np.bincount(slots.key[running], weights=np.maximum(slots.total - slots.scheduled, 0)[running],
                           minlength=len(tokens))  # fmt: skip
        priorities = np.full(len(tokens), 127)
        np.minimum.at(priorities, slots.key[running], slots.priority[running])
        found = {
            key: _Demand(key, int(priorities[number]), int(tokens[number]), number, int(left[number]))
            for key, number in state.pool.running_keys.items()
        }
        for priority, key, given in state.queue.waiting.flows():
            known = found.get(key) or _Demand(key, int(priority), 0, -1, 0)
            found[key] = known._replace(
                priority=min(known.priority, int(priority)),
                tokens=known.tokens + min(given, most),
                left=known.left + given,
            )
        return [demand for demand in found.values() if demand.tokens]

    def _hold(self, demands: list["_Demand"], small: list["_Demand"]) -> np.ndarray | None:
        """Return which slots are held back, bool ``[slots]``; None if the pool does not allow it."""
        state, slots = self._state, self._state.pool.slots
        others = np.ones(state.pool.running_keys.size, bool)
        others[[demand.number for demand in small if demand.number >= 0]] = False
        running = slots.running_slots()
        # Of a higher class than the small demands nothing is held back.
        chosen = others[slots.key[running]] & (slots.priority[running] >= small[0].priority)
        chosen &= _wanted(state, running) > 0
        held = np.zeros(len(slots.active), bool)
        held[running[chosen]] = True
        return held if self._fits(running, chosen) else None

    def _fits(self, running: np.ndarray, held: np.ndarray) -> bool:
        """Return whether the pool holds everything that runs if the ``held`` of ``running`` are a step later."""
        state, slots, pool = self._state, self._state.pool.slots, self._state.pool.pages
        most = -(-(slots.limit[running] - 1) // pool.page_size)
        if pool.in_use + int(np.maximum(most - slots.page_count[running], 0).sum()) <= pool.size:
            return True
        sequences = running_sequences(slots, state.pool.step)
        later = sequences._replace(end=sequences.end + held, delay=sequences.delay + held)
        return bool(forecast_running(state, later, int(later.end.max(initial=0)) + 1).curve.max() <= pool.size)


class _Demand(NamedTuple):
    """What a key could compute in the next plan, if it had it for itself."""

    key: str
    priority: int  # the highest class of its samples
    tokens: int
    number: int  # of `RunningKeys`; -1: none of its sequences runs
    left: int  # tokens until all of its work is done, answers of waiting samples aside
    may: bool = False  # it may have steps of its own


def _wanted(state: State, running: np.ndarray) -> np.ndarray:
    """Return the tokens that sequences could compute next, int64 beside ``running``."""
    slots = state.pool.slots
    missing = np.maximum(slots.given[running] - slots.scheduled[running], 0)
    decodes = (missing == 0) & (slots.scheduled[running] < slots.limit[running] - 1)
    wanted: np.ndarray = missing + decodes
    return wanted


def _small(demands: list[_Demand], step_cost: float, whole: float) -> list[_Demand]:
    """Return the demands that have a plan of their own: of the highest class, as many of the smallest as leave it much
    shorter than ``whole``, the cost of a plan with everything. Empty if there are none."""
    top = min((demand.priority for demand in demands), default=0)
    may = [demand for demand in demands if demand.priority == top and demand.may]
    ordered = sorted(may, key=lambda demand: demand.tokens)
    cost, count = step_cost, 0
    for demand in ordered:
        cost += demand.tokens
        if cost * _SHORTER > whole:
            break
        count += 1
    return ordered[:count] if count < len(demands) else []
