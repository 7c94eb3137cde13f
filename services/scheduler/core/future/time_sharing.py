"""Shares the time of the device between keys of different demand: keys of small demand get their own steps.

A step lasts as long as all of its tokens need. A key that computes one token in each step would be slowed down by the
prompts of another key, though it uses less than its share. So while some keys need much less of a step than others,
most plans pause the others: their sequences keep slots and pages, and compute nothing. Both sides get the same time: a
plan without paused sequences earns the time that later plans of small demands spend. A plan costs its tokens and the
fixed cost of a step, ``Queue.step_cost``.

Steps with few tokens use the device badly. So a key gets its own steps only if it recently got less than half of its
fair share, or if its work is nearly complete and it got no more than its share. Busy keys with varying demand share
full steps.

Paused sequences end one step later. No sequence is paused if the pool could then be too small. With one key, this
module does nothing.
"""

from typing import NamedTuple

import numpy as np

from services.scheduler.core.future.admission import forecast_running
from services.scheduler.core.future.sequences import running_sequences
from services.scheduler.core.state import State

_SHORTER = 1.5  # a step that is not shorter by this factor is not worth a plan
_SOON = 2.0  # work of at most this multiple of a step's fixed cost counts as nearly complete


class KeyTimeSlice(NamedTuple):
    """The keys for which a plan computes tokens."""

    keys: frozenset[str]  # keys whose waiting samples may be admitted
    paused: np.ndarray  # bool [slots], slots that compute nothing in this plan


class TimeSharing:
    """Chooses which keys a plan serves. Owned by the core, for as long as one worker is attached."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._credit = 0.0  # cost of full plans that plans of small demands have not spent

    def next(self) -> KeyTimeSlice | None:
        """Return the keys that the next plan serves, or None for all keys. Postpone the ends of paused sequences."""
        state = self._state
        most = state.queue.step_cost + state.pool.shape.max_tokens_per_step
        if state.queue.quarantined is not None or not state.several_keys:
            self._credit = most
            return None
        demands = self._demands()
        keys, soon = [demand.key for demand in demands], _SOON * state.queue.step_cost
        behind, even = state.queue.recent.behind(keys), state.queue.recent.behind(keys, 1.0)
        demands = [
            demand._replace(may_run_alone=demand.key in (even if demand.left <= soon else behind)) for demand in demands
        ]
        whole = state.queue.step_cost + min(
            sum(demand.tokens for demand in demands), state.pool.shape.max_tokens_per_step
        )
        small = _small(demands, state.queue.step_cost, whole)
        cost = state.queue.step_cost + sum(demand.tokens for demand in small)
        if not small:
            self._credit = whole
            return None
        if self._credit < cost or (paused := self._pause(demands, small)) is None:
            self._credit = min(self._credit + whole, most)
            return None
        self._credit -= cost
        self._state.pool.slots.end_step[paused] += 1
        return KeyTimeSlice(frozenset(demand.key for demand in small), paused)

    def _demands(self) -> list["_Demand"]:
        """Return the demand of each key."""
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
            for key, number in state.pool.running_keys.numbers.items()
        }
        for priority, key, given in state.queue.waiting.flows():
            known = found.get(key) or _Demand(key, int(priority), 0, -1, 0)
            found[key] = known._replace(
                priority=min(known.priority, int(priority)),
                tokens=known.tokens + min(given, most),
                left=known.left + given,
            )
        return [demand for demand in found.values() if demand.tokens]

    def _pause(self, demands: list["_Demand"], small: list["_Demand"]) -> np.ndarray | None:
        """Return the slots to pause, bool ``[slots]``, or None if the pool is too small for that."""
        state, slots = self._state, self._state.pool.slots
        others = np.ones(state.pool.running_keys.size, bool)
        others[[demand.number for demand in small if demand.number >= 0]] = False
        running = slots.running_slots()
        # Sequences of a higher class than the small demands are not paused.
        chosen = others[slots.key[running]] & (slots.priority[running] >= small[0].priority)
        chosen &= _wanted(state, running) > 0
        paused = np.zeros(len(slots.active), bool)
        paused[running[chosen]] = True
        return paused if self._fits(chosen) else None

    def _fits(self, paused: np.ndarray) -> bool:
        """Return whether the pool suffices if the running sequences ``paused``, bool, end a step later."""
        state, pool = self._state, self._state.pool
        if pool.holds_longest():
            return True
        later = running_sequences(pool.slots, pool.step, state.queue.steps_ahead).delayed(paused.astype(np.int64))
        return bool(forecast_running(state, later, int(later.end.max(initial=0)) + 1).curve.max() <= pool.pages.size)


class _Demand(NamedTuple):
    """The tokens that a key could compute in the next plan if no other key had requests."""

    key: str
    priority: int  # the highest class of its samples
    tokens: int
    number: int  # number in ``Pool.running_keys``; -1 = no sequence of it runs
    left: int  # tokens of all of its work, without the answers of waiting samples
    may_run_alone: bool = False  # it may have its own steps


def _wanted(state: State, running: np.ndarray) -> np.ndarray:
    """Return the tokens that sequences could compute next: int64 beside ``running``."""
    slots = state.pool.slots
    missing = np.maximum(slots.given[running] - slots.scheduled[running], 0)
    decodes = (missing == 0) & (slots.scheduled[running] < slots.limit[running] - 1)
    wanted: np.ndarray = missing + decodes
    return wanted


def _small(demands: list[_Demand], step_cost: float, whole: float) -> list[_Demand]:
    """Return the demands that get their own plan, or an empty list.

    These are the smallest demands of the highest class for which the plan costs much less than ``whole``, the cost of a
    plan with all demands.
    """
    top = min((demand.priority for demand in demands), default=0)
    alone = [demand for demand in demands if demand.priority == top and demand.may_run_alone]
    ordered = sorted(alone, key=lambda demand: demand.tokens)
    cost, count = step_cost, 0
    for demand in ordered:
        cost += demand.tokens
        if cost * _SHORTER > whole:
            break
        count += 1
    return ordered[:count] if count < len(demands) else []
