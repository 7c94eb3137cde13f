"""Online requests beside a batch: they never wait for a line of it to end, and the batch gets through all the same."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core.request import AdmissionMode, FinishReason, Priority
from tests.fakes.model import FakeShape
from tests.properties import examples
from tests.scheduler.core.driver import Driver, check_all

HIGH, NORMAL, LOW = Priority
SHAPE = {
    "vocab_size": 62, "page_size": 4, "page_count": 400, "max_slots": 4, "max_tokens_per_step": 32,
    "max_context_tokens": 256, "first_token": 2,
}  # fmt: skip


def driver(*, shape=None, **policy) -> Driver:
    return Driver(FakeShape(**SHAPE | (shape or {})), **{"mode": AdmissionMode.PREDICTED, "margin": 0.0, **policy})


def fill(driver: Driver, count: int, **fields) -> list[int]:
    """Lines of a batch, and the first plans with them."""
    handles = []
    for number in range(count):
        asked = {"tokens": [10 + number] * 6, "max_tokens": 150, "priority": LOW} | fields
        handles.append(driver.submit(**asked))
    for _ in range(6):
        driver.step()
    return handles


def running(driver: Driver) -> set[int]:
    return {sample.handle for sample in driver.core.state.pool.slots.running_samples()}


def test_a_request_takes_the_slot_of_a_batch_line_at_once():
    batch = driver()
    fill(batch, 8)
    online = batch.submit([3, 4, 5], max_tokens=5)
    batch.answer()
    batch.plan()
    assert online in running(batch)
    assert (batch.core.state.queue.counters.yields, batch.core.state.queue.counters.preemptions) == (1, 0)
    check_all(batch)


def test_a_request_takes_the_pages_of_batch_lines_at_once_and_no_more_than_it_needs():
    batch = driver(shape={"page_count": 100, "max_slots": 16})
    lines = fill(batch, 6, tokens=[9] * 3, max_tokens=95, cache_salt="")
    held = len(running(batch))
    assert held == 4  # of 25 pages each, less what they share
    online = batch.submit([3] * 12, max_tokens=80)
    batch.answer()
    batch.plan()
    assert online in running(batch)
    assert len(running(batch) & set(lines)) >= held - 2
    check_all(batch)


def test_a_request_does_not_wait_for_the_whole_prompt_of_a_batch_line():
    batch = driver()
    line = batch.submit([7, 8] * 100, max_tokens=20, priority=LOW)
    batch.plan()
    online = batch.submit([3, 4, 5], max_tokens=2)
    batch.plan()
    assert online in running(batch)
    assert batch.seen[line].tokens == []
    before = batch.model.prefilled_tokens
    check_all(batch)
    assert batch.model.prefilled_tokens - before < 200  # what was computed of the prompt is not computed again


def test_a_request_waits_no_plan_for_a_prompt_that_was_preempted_often():
    batch = driver()
    batch.submit([7, 8] * 100, max_tokens=20, priority=LOW)
    batch.plan()
    for _ in range(7):
        batch.answer()
        online = batch.submit([3, 4, 5], max_tokens=1)
        batch.plan()
        assert batch.requests[online].samples[0].cached_tokens >= 0  # it was let in
    check_all(batch)


@pytest.mark.parametrize(
    ("line", "online"), [({"mode": AdmissionMode.GUARANTEED}, {}), ({"priority": NORMAL}, {"priority": HIGH})]
)
def test_only_predicted_sequences_of_the_lowest_class_are_preempted(line, online):
    batch = driver()
    lines = fill(batch, 4, **line)
    batch.submit([3, 4, 5], max_tokens=5, **online)
    batch.step()
    assert running(batch) == set(lines)
    assert batch.core.state.queue.counters.yields == 0
    check_all(batch)


def test_a_prompt_held_for_waiting_low_samples_is_released():
    batch = driver(shape={"page_count": 45, "max_slots": 1}, prefix_caching=False)
    batch.submit([7] * 53, max_tokens=3, n=5, priority=LOW)
    batch.step()
    online = batch.submit([60] * 30, max_tokens=100)
    for _ in range(2):
        batch.answer()
        batch.plan()
    assert online in running(batch)
    check_all(batch)


def test_no_sequence_is_preempted_if_it_does_not_help():
    batch = driver(shape={"page_count": 60, "max_slots": 8})
    batch.submit([5] * 8, max_tokens=150, mode=AdmissionMode.GUARANTEED)
    line = batch.submit([6] * 8, max_tokens=60, priority=LOW)
    for _ in range(4):
        batch.step()
    batch.submit([3] * 100, max_tokens=20)  # fits when the first is gone
    batch.step()
    assert line in running(batch)
    assert batch.core.state.queue.counters.yields == 0
    check_all(batch)


@pytest.mark.parametrize(("slots", "normal", "low"), [(1, 0, 1), (32, 30, 2)])
def test_overdue_low_sequences_are_not_preempted_in_vain(slots, normal, low):
    shape = {"max_slots": slots, "page_count": 4000, "max_tokens_per_step": 256}
    batch = driver(shape=shape, ageing_s=3e-8)  # 30 ticks of the clock
    for number in range(normal):
        batch.submit([60, number], max_tokens=150)
    lines = fill(batch, low)
    batch.clock += 100
    online = batch.submit([3, 4, 5], max_tokens=5)
    batch.answer()
    batch.plan()
    # An eighth of what runs holds its own: all lines here, and both of 30 go on beside requests.
    assert batch.core.state.queue.counters.yields == 0
    assert set(lines) <= running(batch)
    assert online not in running(batch)
    check_all(batch)


@pytest.mark.slow
def test_sequences_preempted_four_times_are_protected_up_to_an_eighth_of_all():
    batch = driver(shape={"max_slots": 16, "max_tokens_per_step": 128})
    lines = fill(batch, 16)
    for _ in range(100):
        for number in range(16):
            batch.submit([3 + number] * 5, max_tokens=2)
        for _ in range(4):
            batch.step()
    protected = [line for line in lines if batch.requests[line].samples[0].preempted_for_others >= 4]
    assert protected
    assert max(batch.requests[line].samples[0].preempted_for_others for line in lines) >= 4
    slots = batch.core.state.pool.slots
    assert ((slots.priority == LOW) & slots.active & ~slots.preemptible).sum() <= 2
    check_all(batch)


def test_a_batch_job_completes_under_requests_that_would_fill_every_slot():
    batch = driver(ageing_s=2e-7)  # 200 ticks of the clock
    lines = fill(batch, 3, max_tokens=60)
    for _ in range(4000):
        if all(batch.seen[line].finish for line in lines):
            break
        while len(batch.core.state.queue.waiting) < 6:
            batch.submit([3 + batch.clock % 50] * 5, max_tokens=4)
        batch.step()
    assert all(batch.seen[line].finish.reason is FinishReason.LENGTH for line in lines)
    check_all(batch)


@pytest.mark.parametrize("shape", [{}, {"page_count": 100, "max_slots": 64, "max_tokens_per_step": 128}])
def test_overdue_low_samples_do_not_precede_requests_while_low_sequences_run(shape):
    """Whether slots or pages are what lines wait for."""
    batch = driver(ageing_s=1e-9, shape=shape)  # every line that waits is old at once
    fill(batch, 12)
    for _ in range(30):
        batch.step()
    online = batch.submit([3, 4, 5], max_tokens=100)
    batch.answer()
    batch.plan()
    assert online in running(batch)
    check_all(batch)


@settings(max_examples=examples(60, share=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90), st.sampled_from([1, 1, 5])), min_size=1, max_size=12),
    st.integers(45, 120), st.integers(1, 8), st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_a_request_is_admitted_by_the_next_plans_whatever_a_batch_job_runs(lines, pages, slots, steps, caching):
    """The next plan; one more where prompts that are held for samples of lines must be let go."""
    shape = {"page_count": pages, "max_slots": slots}
    batch = driver(shape=shape, prefix_caching=caching)
    for number, (length, limit, n) in enumerate(lines):
        batch.submit([2 + number] * length, max_tokens=limit, n=n, priority=LOW)
    for _ in range(steps):
        batch.step()
    online = batch.submit([60] * 30, max_tokens=100)
    for _ in range(2):
        batch.answer()
        batch.plan()
    assert batch.requests[online].samples[0].cached_tokens >= 0  # it was let in
    check_all(batch)
