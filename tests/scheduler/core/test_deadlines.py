"""Deadlines: every unfinished request with one is due at its time, however many there are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.queue.deadlines import Deadlines
from services.scheduler.core.request import FinishReason, Request, SamplingSettings
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import Driver


def request(deadline_ms: int | None) -> Request:
    made = Request("r", np.zeros(1, np.uint32), SamplingSettings(), deadline_ms=deadline_ms)
    made.unfinished = 1
    return made


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 200), st.randoms(use_true_random=False))
def test_each_unfinished_request_is_due_once_at_its_deadline(count, one_finished_in, horizon, chance):
    deadlines, unfinished = Deadlines(), []
    for _ in range(count):
        unfinished.append(request(chance.choice([None, chance.randrange(horizon)])))
        deadlines.add(unfinished[-1])
        if chance.randrange(one_finished_in) == 0:
            unfinished.pop(chance.randrange(len(unfinished))).unfinished = 0
    for now_ms in range(-1, horizon, 7):
        due = [each for each in unfinished if each.deadline_ms is not None and each.deadline_ms <= now_ms]
        assert sorted(map(id, deadlines.due(now_ms))) == sorted(map(id, due))
        unfinished = [each for each in unfinished if each not in due]
        assert deadlines.next_ms() == min(
            (e.deadline_ms for e in unfinished if e.deadline_ms is not None), default=None
        )


@pytest.mark.parametrize("slots", [2, 8])
def test_a_deadline_ends_every_sample_of_its_request(slots):
    """Whether it runs or waits."""
    shape = FakeShape(vocab_size=62, page_size=4, page_count=100, max_slots=slots, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    driver.submit([3, 4, 5], n=5, max_tokens=50, deadline_ms=1000)
    for _ in range(3):
        driver.step()
    assert driver.core.state.slots.running == min(5, slots)
    driver.core.end_overdue(1000)
    driver.collect()
    assert [seen.finish.reason for seen in driver.seen.values()] == [FinishReason.DEADLINE] * 5
    assert driver.core.state.pool.in_use == len(driver.core.state.waiting) == 0
