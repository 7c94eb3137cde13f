"""When what is queued will start and finish, if every sequence runs to its limit."""

from typing import NamedTuple

import numpy as np

from services.scheduler.core.admission import running_curve
from services.scheduler.core.request import Request
from services.scheduler.core.state import State

# Waiting samples that are placed one by one; behind them, further ones are taken to start when the last of these does.
_PLACED = 512
_MOST_CELLS = 4 * 1024 * 1024  # of curve looked through for all of them: the step loop waits meanwhile


class Outlook(NamedTuple):
    """Steps from now."""

    start: int  # first token
    finish: int  # last token
    curve: np.ndarray  # int64, pages in use at steps 0, 1, ...; the subject and all before it included


def first_release_step(state: State) -> int:
    """Steps until the first running sequence is released at the latest."""
    active = np.flatnonzero(state.slots.active)
    return int(max(1, (state.slots.end_step[active] - state.step).min(initial=1))) if len(active) else 1


def look_ahead(state: State, subject: Request) -> Outlook:
    """Place the queue behind the running sequences, first come first served, until ``subject`` has its place.

    ``subject`` may be queued, running, or not submitted (then it comes last of its class).
    """
    horizon = subject.limit + int(max(1, (state.slots.end_step - state.step)[state.slots.active].max(initial=1)))
    curve = running_curve(state.pool, state.slots, state.step, state.sharing.values(), 2 * horizon)
    slots_used = _running_curve(state, len(curve))
    start, finish = _of_running(state, subject)
    queue = [sample.request for sample in state.waiting if _precedes(sample.request, subject)]
    queue += [subject] * (subject.n if not subject.samples else 0)
    at, prefill, cells = 0, _prefill_left(state), 0
    for index, request in enumerate(queue):
        prefill += len(request.tokens)
        if index < _PLACED and cells < _MOST_CELLS:
            cells += len(curve)
            needed = -(-(request.limit - 1) // state.shape.page_size)
            curve, slots_used = _extend(curve, at + request.limit), _extend(slots_used, at + request.limit)
            at = _first_fit(curve, slots_used, at, needed, state.pool.size, state.shape.max_running)
            at = max(at, prefill // state.shape.max_tokens_per_step)
            length = max(1, request.limit - len(request.tokens))
            curve, slots_used = _extend(curve, at + length + 1), _extend(slots_used, at + length + 1)
            curve[at : at + length] += needed
            slots_used[at : at + length] += 1
        if request is subject:
            begins = at + max(1, -(-len(request.tokens) // state.shape.max_tokens_per_step))
            start = begins if start is None else min(start, begins)
            finish = max(finish, begins + request.limit - len(request.tokens) - 1)
    return Outlook(start or 0, finish, curve)


def _precedes(request: Request, subject: Request) -> bool:
    return request is subject or request.priority <= subject.priority


def _of_running(state: State, subject: Request) -> tuple[int | None, int]:
    """(start, finish) of the subject's samples that run or are through."""
    start: int | None = None
    finish = 0
    for sample in subject.samples:
        if sample.finished:
            start = 0
        elif sample.slot >= 0:
            slots, slot = state.slots, sample.slot
            missing = int(slots.given[slot] - slots.scheduled[slot])
            sampled = slots.known[slot] > slots.given[slot]
            begins = 0 if sampled else 1 + max(0, missing) // state.shape.max_tokens_per_step
            start = begins if start is None else min(start, begins)
            finish = max(finish, begins + int(slots.limit[slot] - slots.known[slot]))
    return start, finish


def _prefill_left(state: State) -> int:
    return sum(int(state.slots.given[slot] - state.slots.scheduled[slot]) for slot in state.prefilling)


def _running_curve(state: State, length: int) -> np.ndarray:
    """Slots in use at steps 0, 1, ..."""
    ends = np.clip((state.slots.end_step - state.step)[state.slots.active], 0, length)
    gone = np.cumsum(np.bincount(ends, minlength=length + 1))[:length]
    return np.count_nonzero(state.slots.active) - gone


def _extend(curve: np.ndarray, length: int) -> np.ndarray:
    missing = length + 1 - len(curve)
    return np.concatenate((curve, np.full(missing, curve[-1]))) if missing > 0 else curve


def _first_fit(pages: np.ndarray, slots: np.ndarray, at: int, needed: int, total: int, most: int) -> int:
    """First step from ``at`` from which on there is room for ``needed`` pages and a slot for good."""
    full = np.flatnonzero((pages[at:] + needed > total) | (slots[at:] >= most))
    return at if len(full) == 0 else at + int(full[-1]) + 1
