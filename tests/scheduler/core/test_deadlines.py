"""Deadlines: every unfinished request with one is due at its time, however many there are."""

import random

import numpy as np
import pytest

from services.scheduler.core.queue.deadlines import Deadlines
from services.scheduler.core.request import FinishReason, Request, SamplingSettings
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import Driver


def request(deadline_ms: int | None) -> Request:
    made = Request("r", np.zeros(1, np.uint32), SamplingSettings(), deadline_ms=deadline_ms)
    made.unfinished = 1
    return made


@pytest.mark.parametrize("count", [10, 1500, 5000])
@pytest.mark.parametrize("finished", [0.0, 0.4, 0.9])
def test_each_unfinished_request_is_due_once_at_its_deadline(count, finished):
    deadlines, unfinished, chance = Deadlines(), [], random.Random(count)
    for _ in range(count):
        unfinished.append(request(chance.choice([None, *[chance.randrange(100)] * 5])))
        deadlines.add(unfinished[-1])
        if chance.random() < finished:
            unfinished.pop(chance.randrange(len(unfinished))).unfinished = 0
    for now_ms in range(-1, 107, 7):
        due = {id(each) for each in unfinished if each.deadline_ms is not None and each.deadline_ms <= now_ms}
        assert sorted(map(id, deadlines.due(now_ms))) == sorted(due)
        unfinished = [each for each in unfinished if id(each) not in due]
        left = [each.deadline_ms for each in unfinished if each.deadline_ms is not None]
        assert deadlines.next_ms() == min(left, default=None)


@pytest.mark.parametrize("slots", [2, 8])
def test_a_deadline_ends_every_sample_of_its_request(slots):
    """A sample ends at its deadline while it runs and while it waits."""
    shape = FakeShape(vocab_size=62, page_size=4, page_count=100, max_slots=slots, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    driver.submit([3, 4, 5], n=5, max_tokens=50, deadline_ms=1000)
    for _ in range(3):
        driver.step()
    assert driver.core.state.pool.slots.running == min(5, slots)
    driver.core.end_overdue(1000)
    driver.collect()
    assert [seen.finish.reason for seen in driver.seen.values()] == [FinishReason.DEADLINE] * 5
    assert driver.core.state.pool.pages.in_use == len(driver.core.state.queue.waiting) == 0
