"""A sequence whose tokens take too long fails, and nobody beside it."""

from concurrent.futures import Future

import pytest

from services.worker.sampling import patience
from services.worker.sampling.follower import Follower
from services.worker.sampling.patience import MOST_MASK_S, Patience


class Clock:
    """Each follower takes its time, together or alone."""

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
    def run(calls: int, *costs: float, bounded: bool = True) -> list[str]:
        clock, followers = Clock(*costs), [Follower(Future()) for _ in costs]
        monkeypatch.setattr(patience, "time", clock)
        judge = Patience(bounded=bounded)
        for _ in range(calls):
            judge.call(followers, clock.one, clock.together)
        return [follower.failure.message if follower.failure else "" for follower in followers]

    return run


def test_one_alone_fails_at_once(run):
    [reason] = run(1, 2 * MOST_MASK_S)
    assert "a token took it more than 0.5 s" in reason


def test_of_several_the_slow_one_fails_at_its_next_token(run):
    assert run(1, 0.01, 2 * MOST_MASK_S, 0.01) == ["", "", ""]
    first, slow, last = run(2, 0.01, 2 * MOST_MASK_S, 0.01)
    assert (first, last) == ("", "")
    assert "more than" in slow


def test_many_that_are_slow_together_only_stay(run):
    assert run(50, *[MOST_MASK_S / 10] * 20) == [""] * 20


def test_a_rank_that_does_not_report_has_all_the_time(run):
    assert run(3, 2 * MOST_MASK_S, 2 * MOST_MASK_S, bounded=False) == ["", ""]
    assert run(3, 2 * MOST_MASK_S, bounded=False) == [""]
    assert Patience(bounded=False).until() is None
