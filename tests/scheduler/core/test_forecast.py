"""The forecast is what a naive simulation says, and what then happens."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.scheduler.core.admission import running_curve
from services.scheduler.core.forecast import Candidate, candidate_curve
from services.scheduler.core.pages import FAR
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import SINK, Driver
from tests.scheduler.core.test_histories import prompts, shapes


def curve_of(driver: Driver) -> np.ndarray:
    state = driver.core.state
    return running_curve(state.pool, state.slots, state.step, state.sharing.values())


def simulate(driver: Driver, steps: int) -> list[int]:
    """Walk every running sequence forward, one token of every step, holding pages by number."""
    state = driver.core.state
    slots, size = state.slots, state.shape.page_size
    sequences = []
    for slot in np.flatnonzero(slots.active).tolist():
        length = max(int(slots.scheduled[slot]), int(slots.given[slot]))
        starts = int(slots.delay[slot])
        sequences.append([length, int(slots.limit[slot]), int(slots.end_step[slot]) - state.step, starts,
                          [("held", page) for page in slots.pages(slot).tolist()], slot])  # fmt: skip
    lasting = {("held", page) for pages in state.sharing.values() for page in pages.tolist()}
    found = []
    for step in range(steps):
        in_use = set(lasting)
        for sequence in sequences:
            length, limit, end, starts, pages, slot = sequence
            if step > starts and length < limit - 1:
                if length == len(pages) * size:
                    pages.append((slot, len(pages)))
                sequence[0] = length + 1
            if step < end:
                in_use.update(pages)
        found.append(len(in_use))
    return found


@st.composite
def drivers(draw):
    """A core after a few steps of something."""
    driver = Driver(draw(shapes()), steps_ahead=draw(st.integers(2, 4)))
    for _ in range(draw(st.integers(1, 8))):
        try:
            driver.submit(draw(prompts()), n=draw(st.sampled_from([1, 1, 2, 5])), max_tokens=draw(st.integers(1, 30)))
        except InvalidRequest:
            continue
        for _ in range(draw(st.integers(0, 6))):
            driver.step()
        if draw(st.booleans()):
            driver.cancel(draw(st.integers(0, 8)))
    return driver


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(drivers())
def test_the_curve_equals_a_naive_simulation(driver):
    curve = curve_of(driver)
    assert curve.tolist() == simulate(driver, len(curve))
    assert curve.max() <= driver.core.state.pool.size


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(drivers())
def test_what_happens_follows_the_curve(driver):
    """Answers come as late as they can and nobody stops early. With a prefill in progress the curve is a bound."""
    state = driver.core.state
    driver.cancel(*[sample.handle for sample in state.waiting])
    exact = not state.prefilling
    curve, begun = curve_of(driver), state.step
    while driver.core.live(SINK):
        if driver.core.plans_in_flight == state.steps_ahead:
            driver.answer()
        if driver.plan() is None:
            driver.answer()
            continue
        expected = curve[state.step - begun] if state.step - begun < len(curve) else 0
        assert state.pool.in_use == expected if exact else state.pool.in_use <= expected


@given(
    st.integers(0, 20), st.integers(1, 30), st.integers(0, 20), st.integers(0, 80),
    st.lists(st.integers(0, 90), max_size=5), st.integers(1, 9), st.integers(1, 100),
)  # fmt: skip
def test_a_candidate_adds_what_a_loop_adds(new_pages, first, count, life, kept, page_size, horizon):
    end = first + count * page_size + life
    candidate = Candidate(new_pages, first, count, end, np.array(kept, np.int64))
    expected = []
    for step in range(horizon):
        grown = sum(first + index * page_size <= step for index in range(count))
        longer = sum(page_end <= step for page_end in kept)
        expected.append(new_pages + grown + longer if step < end else 0)
    # A page kept longer than its holders, beyond the candidate's own end, is not the candidate's: never asked for.
    if all(page_end < end for page_end in kept):
        assert candidate_curve(candidate, page_size, horizon).tolist() == expected


def test_sequences_that_end_at_different_times_share_pages_they_never_need_together():
    """Two sequences whose limits add up to more than the pool run together, since one ends before the other grows."""
    shape = FakeShape(vocab_size=62, page_size=4, page_count=12, max_slots=4, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    driver.submit([2, 3], max_tokens=39)  # ten pages at its end
    for _ in range(3):
        driver.step()
    driver.submit([4, 5], max_tokens=11)  # three pages, over before the first has eight
    driver.step()
    assert driver.core.state.slots.running == 2
    driver.run()


def test_the_head_of_the_queue_is_not_overtaken():
    shape = FakeShape(vocab_size=62, page_size=4, page_count=10, max_slots=4, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    driver.submit([2] * 8, max_tokens=20)
    driver.submit([3] * 20, max_tokens=20)  # does not fit beside the first
    driver.submit([4], max_tokens=2)  # would fit
    driver.run()
    assert [name for plan in driver.plans for name in plan.admitted_ids] == ["r0", "r1", "r2"]


def test_an_unknown_end_is_far_away():
    assert FAR > 2**60


def test_a_page_that_a_cancelled_sample_would_have_kept_is_counted_until_its_holders_end():
    """Pages reused right after a cancel: their ends must be those of the holders that are left, or a plan runs out."""
    shape = FakeShape(vocab_size=62, page_size=2, page_count=26, max_slots=8, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    prompt = list(range(2, 15))
    driver.submit(prompt[:8], max_tokens=6)
    for _ in range(4):
        driver.step()
    cancelled = driver.submit(prompt[:6], n=2, max_tokens=8)
    driver.step()
    driver.cancel(cancelled, cancelled + 1)
    driver.submit([*prompt, *[51] * 5], max_tokens=27)
    driver.submit([40 + index % 10 for index in range(10)], max_tokens=14)
    driver.run()  # every plan finds the pages it needs
    assert driver.core.state.pool.in_use == 0
