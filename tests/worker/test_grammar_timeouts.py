"""A sequence whose grammar takes too long for a token fails, and no other sequence does."""

from concurrent.futures import Future

import pytest

from services.worker.sampling import grammar_timeouts
from services.worker.sampling.grammar_state import GrammarState
from services.worker.sampling.grammar_timeouts import TOKEN_TIMEOUT_S, call_timed


class Clock:
    """A clock that advances by the cost of each state, alone or together."""

    def __init__(self, *costs: float) -> None:
        self.now, self.costs = 0.0, list(costs)

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic

    def one(self, index: int) -> None:
        self.now += self.costs[index]

    def together(self, indices: list[int]) -> None:
        for index in indices:
            self.one(index)


@pytest.fixture
def run(monkeypatch):
    def run(calls: int, *costs: float) -> list[str]:
        clock, states = Clock(*costs), [GrammarState(Future()) for _ in costs]
        monkeypatch.setattr(grammar_timeouts, "time", clock)
        for _ in range(calls):
            call_timed(states, clock.one, clock.together)
        return [state.failure.message if state.failure else "" for state in states]

    return run


def test_one_alone_fails_at_once(run):
    [reason] = run(1, 2 * TOKEN_TIMEOUT_S)
    assert "a token took it more than 0.5 s" in reason


def test_of_several_the_slow_one_fails_at_its_next_token(run):
    assert run(1, 0.01, 2 * TOKEN_TIMEOUT_S, 0.01) == ["", "", ""]
    first, slow, last = run(2, 0.01, 2 * TOKEN_TIMEOUT_S, 0.01)
    assert (first, last) == ("", "")
    assert "more than" in slow


def test_many_that_are_slow_together_only_stay(run):
    assert run(50, *[TOKEN_TIMEOUT_S / 10] * 20) == [""] * 20
