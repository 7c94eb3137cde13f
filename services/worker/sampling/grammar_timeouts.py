"""Timeouts for grammars, since all sequences of a step wait for the slowest one."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from services.worker.sampling.grammar_state import GrammarState

COMPILE_TIMEOUT_S = 2.0  # per step, wall clock
TOKEN_TIMEOUT_S = 0.5  # CPU time of the thread for one sequence, wall clock for several sequences together
_TIMED_CALLS = 32  # calls that are timed alone, for each of several sequences that were too slow together


class GrammarTimeouts:
    """Fails sequences whose grammar takes too long. Several threads may use it at once for different sequences.

    All ranks must sample the same tokens, but their clocks differ. Only the rank that reports failures to the scheduler
    is bounded. The scheduler then releases the sequence, so the tokens of the other ranks have no effect.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._bounded = bounded

    def deadline(self) -> float | None:
        """Return the time, by ``time.monotonic``, at which grammars must be compiled; None if unbounded."""
        return time.monotonic() + COMPILE_TIMEOUT_S if self._bounded else None

    def call(
        self, states: Sequence[GrammarState], one: Callable[[int], Any], together: Callable[[list[int]], Any]
    ) -> None:
        """Call ``one(index)`` for each state that is timed alone, and ``together(indices)`` for all others.

        A state that is timed alone and too slow fails. If the others are too slow together, their next calls are timed
        alone.
        """
        if len(states) == 1:
            self._time(states[0], one, 0)
            return
        others = []
        for index, state in enumerate(states):
            if state.timed_calls:
                state.timed_calls -= 1
                self._time(state, one, index)
            else:
                others.append(index)
        if not others:
            return
        before = time.monotonic()
        together(others)
        if self._bounded and time.monotonic() - before > TOKEN_TIMEOUT_S:
            for index in others:
                states[index].timed_calls = _TIMED_CALLS

    def _time(self, state: GrammarState, one: Callable[[int], Any], index: int) -> None:
        before = time.thread_time()
        one(index)
        if self._bounded and time.thread_time() - before > TOKEN_TIMEOUT_S:
            state.fail(f"a token took it more than {TOKEN_TIMEOUT_S:g} s: simplify it")
