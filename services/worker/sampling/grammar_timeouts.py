"""Timeouts for grammars, since all sequences of a step wait for the slowest one."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from services.worker.sampling.grammar_state import GrammarState

COMPILE_TIMEOUT_S = 2.0  # per step, wall clock
TOKEN_TIMEOUT_S = 0.5  # CPU time of the thread for one sequence, wall clock for several sequences together
_TIMED_CALLS = 32  # calls that are timed alone, for each of several sequences that were too slow together


def compile_deadline() -> float:
    """Return the time, by ``time.monotonic``, at which the grammars of a step must be compiled."""
    return time.monotonic() + COMPILE_TIMEOUT_S


def call_timed(states: Sequence[GrammarState], one: Callable[[int], Any], together: Callable[[list[int]], Any]) -> None:
    """Call ``one(index)`` for each state that is timed alone, and ``together(indices)`` for all others.

    A state that is timed alone and too slow fails. If the others are too slow together, their next calls are timed
    alone. Several threads may call this at once for different states.
    """
    if len(states) == 1:
        _time(states[0], one, 0)
        return
    others = []
    for index, state in enumerate(states):
        if state.timed_calls:
            state.timed_calls -= 1
            _time(state, one, index)
        else:
            others.append(index)
    if not others:
        return
    before = time.monotonic()
    together(others)
    if time.monotonic() - before > TOKEN_TIMEOUT_S:
        for index in others:
            states[index].timed_calls = _TIMED_CALLS


def _time(state: GrammarState, one: Callable[[int], Any], index: int) -> None:
    before = time.thread_time()
    one(index)
    if time.thread_time() - before > TOKEN_TIMEOUT_S:
        state.fail(f"a token took it more than {TOKEN_TIMEOUT_S:g} s: simplify it")
