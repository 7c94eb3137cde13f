"""The forecast is what a naive simulation says, and what then happens."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.scheduler.core.future.admission import AdmissionControl, _first_gap, running_curve
from services.scheduler.core.request import AdmissionMode
from services.scheduler.core.step import prefill
from tests.fakes.model import FakeShape, continuation
from tests.properties import examples
from tests.scheduler.core.driver import SINK, Driver
from tests.scheduler.core.test_histories import prompts, shapes


def curve_of(driver: Driver) -> np.ndarray:
    return running_curve(driver.core.state, driver.core.state.pool.step)


def starts_of(state, slot: int) -> tuple[int, int]:
    """The steps behind which a sequence decodes, at the earliest and at the latest."""
    slots = state.pool.slots
    delay = int(slots.delay[slot])
    decoding = int(slots.total[slot]) - 1 - int(slots.given[slot])
    latest = int(slots.end_step[slot]) - state.pool.step - decoding - state.queue.steps_ahead
    return delay, max(delay, latest) if delay else 0


def simulate(driver: Driver, steps: int) -> list[int]:
    """Walk every running sequence forward, one token of every step, holding pages by number."""
    state = driver.core.state
    slots, size = state.pool.slots, state.pool.shape.page_size
    sequences = []
    lasting = set()
    for slot in np.flatnonzero(slots.active).tolist():
        length = max(int(slots.scheduled[slot]), int(slots.given[slot]))
        pages = [("held", page) for page in slots.pages(slot).tolist()]
        first = int(slots.left_behind[slot])
        window = 0 if slots.lent_pages[slot] else state.pool.shape.window_tokens
        if slots.lent_pages[slot]:  # waiting siblings will need these, and what else of the tree they hang on
            depth = int(state.pool.tree.depth[slots.node[slot]])
            lasting |= set(pages[: max(depth, int(slots.lent_pages[slot]))])
        end = max(1, int(slots.end_step[slot]) - state.pool.step)
        starts = starts_of(state, slot)
        sequences.append([length, int(slots.limit[slot]), end, starts, pages, slot, length, first, window])
    for request in state.pool.sharing:
        if request.share.ready_step:
            lasting |= {("held", page) for page in state.pool.tree.path(request.share.node).tolist()}
        if request.share.owns_last_page:
            lasting.add(("held", request.share.last_page))
    found = []
    for step in range(steps):
        in_use = set(lasting)
        for sequence in sequences:
            length, limit, end, (starts, late), pages, slot, before, first, window = sequence
            if window and late < step < end:
                computed = min(limit - 1, before + step - 1 - late)
                while (first + 1) * size <= computed + 1 - window:
                    first = sequence[7] = first + 1
            if starts < step < end and length < limit - 1:
                if length == len(pages) * size:
                    pages.append((slot, len(pages)))
                sequence[0] = length + 1
            if step < end:
                in_use.update(pages[first:])
        found.append(len(in_use))
    return found


@st.composite
def drivers(draw):
    """A core after a few steps of something."""
    driver = Driver(draw(shapes()), steps_ahead=draw(st.integers(1, 4)))
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


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(drivers())
def test_the_curve_equals_a_naive_simulation(driver):
    curve = curve_of(driver)
    assert curve.tolist() == simulate(driver, len(curve))
    assert curve.max() <= driver.core.state.pool.pages.size


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(drivers())
def test_a_pool_that_is_too_small_for_all_limits_does_not_hold_the_longest(driver):
    assume(not driver.core.state.pool.prefilling)
    assert not holds_longest_in_too_few_pages(driver)


def test_pages_that_one_of_two_sequences_leaves_behind_are_in_use():
    shape = FakeShape(vocab_size=62, page_size=1, page_count=7, max_slots=2, max_tokens_per_step=2,
                      max_context_tokens=8, first_token=2, window_tokens=3)  # fmt: skip
    driver = Driver(shape)
    for _ in range(2):
        driver.submit([2, 2], max_tokens=3)
        driver.plan()
    assert not holds_longest_in_too_few_pages(driver)


def holds_longest_in_too_few_pages(driver: Driver) -> bool:
    """Take a page from the pool that all sequences would need if they ran to their limits."""
    pool = driver.core.state.pool
    pool.slots.end_step[pool.slots.running_slots()] += pool.shape.max_context_tokens
    pool.pages.size = max(simulate(driver, 2 * pool.shape.max_context_tokens)) - 1
    return pool.holds_longest()


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(drivers())
def test_pages_in_use_follow_the_forecast(driver):
    """No sample stops early. While a prompt is computed in part, the curve is a bound."""
    driver.cancel(*[sample.handle for sample in driver.core.state.queue.waiting])
    check_curve_comes_true(driver)


def check_curve_comes_true(driver: Driver) -> None:
    """Answers come as late as they can until nothing runs."""
    state = driver.core.state
    exact = not state.pool.prefilling
    curve, begun = curve_of(driver), state.pool.step
    while driver.core.live(SINK):
        if driver.core.plans_in_flight == state.queue.steps_ahead:
            driver.answer()
        if driver.plan() is None:
            driver.answer()
            continue
        passed = state.pool.step - begun
        expected = curve[passed] if passed < len(curve) else 0
        assert state.pool.pages.in_use == expected if exact else state.pool.pages.in_use <= expected
        if exact and driver.core.live(SINK):
            now = curve_of(driver)
            assert now.tolist() == curve[passed : passed + len(now)].tolist()
            assert not curve[passed + len(now) :].any()


@settings(max_examples=examples(60, share=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(shapes(), st.integers(1, 40), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(2, 4))
def test_pages_in_use_follow_the_forecast_of_predicted_ends(shape, length, pauses, steps_ahead):
    """Every answer of a class stops by itself behind ``length`` tokens, long before its limit."""
    shape = dataclasses.replace(shape, page_count=400, max_slots=6, max_context_tokens=100, eos_every=0)
    driver = Driver(shape, steps_ahead=steps_ahead, mode=AdmissionMode.PREDICTED, margin=0.0)
    for number in range(20):
        submit_stopping(driver, number, length)
        driver.run()
    for _ in range(40):  # what was learnt is looked at from time to time
        driver.submit([61], max_tokens=1, length_class="another")
        driver.run()
    for number, pause in enumerate(pauses):
        submit_stopping(driver, 20 + number, length)
        for _ in range(pause):
            driver.step()
    while driver.core.state.queue.waiting or driver.core.state.pool.prefilling:
        driver.step()
    slots = driver.core.state.pool.slots
    running = slots.running_slots()
    assert (slots.total[running] == slots.prompt[running] + length).all()
    if driver.core.live(SINK):
        check_curve_comes_true(driver)
    assert all(seen.finish.completion_tokens == length for seen in driver.seen.values() if len(seen.tokens) > 1)


def submit_stopping(driver: Driver, number: int, length: int) -> None:
    """Queue a request whose sample stops by itself behind ``length`` tokens."""
    for last in range(2, 62):
        prompt = [2 + number, last, 2 + number]
        *before, stop = continuation(driver.shape, prompt, length, seed=7)
        if stop not in before:
            driver.submit(prompt, max_tokens=90, length_class="alike", stop_token_ids=frozenset({stop}))
            return
    raise AssertionError("no prompt found")


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
    assert driver.core.state.pool.slots.running == 2
    driver.run()


SMALL = FakeShape(vocab_size=62, page_size=4, page_count=10, max_slots=4, max_tokens_per_step=64,
                  max_context_tokens=64, first_token=2)  # fmt: skip


def admitted(driver: Driver) -> list[str]:
    return [name for plan in driver.plans for name in plan.admitted_ids]


def test_samples_admitted_before_the_head_of_the_queue_keep_its_reservation():
    driver = Driver(SMALL)
    driver.submit([2] * 8, max_tokens=20)  # seven pages at its end
    driver.submit([3] * 20, max_tokens=20)  # ten: must wait for the first
    driver.submit([4], max_tokens=2)  # over before that
    driver.submit([5], max_tokens=40)  # would still be there: the head would wait for it
    driver.run()
    assert admitted(driver) == ["r0", "r2", "r1", "r3"]
    assert driver.core.state.queue.counters.overtakes == 1


def test_a_limited_number_of_samples_is_admitted_before_the_head_of_the_queue(monkeypatch):
    monkeypatch.setattr(prefill, "_MOST_OVERTAKEN", 3)
    driver = Driver(SMALL)
    driver.submit([2] * 8, max_tokens=20)
    driver.submit([3] * 20, max_tokens=20)
    for _ in range(9):
        driver.submit([4], max_tokens=2)
        driver.step()
    driver.run()
    assert admitted(driver).index("r1") == 4  # behind the first and three who passed it


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 12))
def test_a_gap_is_the_first_that_is_long_enough(full, length):
    steps = [*full, *[False] * length]
    expected = next(step for step in range(len(full) + 1) if not any(steps[step : step + length]))
    assert _first_gap(np.array(full, bool), length) == expected


@contextlib.contextmanager
def admissions() -> Iterator[list[tuple[np.ndarray, bool]]]:
    """The forecasts with what admission let in meanwhile, and whether it let samples in in their order."""
    seen, select = [], AdmissionControl.select

    def watched(self, candidates, classes):
        chosen = select(self, candidates, classes)
        curve = self.forecast_for(candidates).with_candidates(candidates.take(chosen))
        seen.append((curve, len(chosen) == 0 or chosen[-1] == len(chosen) - 1))
        return chosen

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AdmissionControl, "select", watched)
        yield seen


def check_admission_is_as_forecast(driver: Driver) -> None:
    """Build a plan. The curve after it is that of the admission with the admitted sequences."""
    while driver.core.plans_in_flight:
        driver.answer()
    state = driver.core.state
    shares = dict(state.pool.sharing)
    with admissions() as seen:
        driver.plan()
    if seen and not state.pool.prefilling and shares.keys() <= state.pool.sharing.keys():
        curve = curve_of(driver)
        forecast, in_order = seen[-1]
        expected = forecast[: len(curve)]
        # A sample that passed another may get more of this step than the queue's order gave it, and end sooner.
        assert (expected == curve).all() if in_order else (expected >= curve).all()


@settings(max_examples=examples(300, share=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(drivers(), prompts(), st.sampled_from([1, 1, 3]))
def test_the_curve_with_candidates_is_the_curve_when_they_are_in(driver, prompt, n):
    with contextlib.suppress(InvalidRequest):
        driver.submit(prompt, n=n, max_tokens=12)
    check_admission_is_as_forecast(driver)


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_prompt_whose_first_page_ends_another_prompt_waits_until_that_page_is_computed(page_size):
    """Both in one plan would compute the page twice, and only one of them would be found by siblings."""
    shape = FakeShape(vocab_size=62, page_size=page_size, page_count=13, max_slots=4, max_tokens_per_step=9,
                      max_context_tokens=14, first_token=2)  # fmt: skip
    driver = Driver(shape)
    first = [2] * page_size
    driver.submit(first, max_tokens=1)
    handle = driver.submit([*first, 2], n=3, max_tokens=6)
    check_admission_is_as_forecast(driver)
    assert admitted(driver) == ["r0"]
    driver.run()
    assert driver.seen[handle].finish.cached_prompt_tokens == page_size
    assert driver.model.prefilled_tokens == page_size + 3


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
    assert driver.core.state.pool.pages.in_use == 0


def test_a_limit_of_plans_in_flight_that_changes_often_leaves_the_forecast():
    shape = FakeShape(vocab_size=62, page_size=4, page_count=400, max_slots=4, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver, others = (Driver(shape, steps_ahead=2) for _ in range(2))
    for each in (driver, others):
        for count in (20, 33, 40):
            each.submit([2, 3], max_tokens=count)
        each.step()
    for _ in range(50):
        driver.core.set_steps_ahead(6)
        driver.core.set_steps_ahead(2)
    assert curve_of(driver).tolist() == curve_of(others).tolist()
    for each in (driver, others):
        each.step()
    assert curve_of(driver).tolist() == curve_of(others).tolist()


def test_a_lower_limit_does_not_end_sequences_before_the_plans_in_flight():
    shape = FakeShape(vocab_size=62, page_size=4, page_count=400, max_slots=4, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape, steps_ahead=2)
    driver.submit([2, 3], max_tokens=4)
    driver.submit([2, 3], max_tokens=40)
    driver.core.set_steps_ahead(6)
    while driver.plan():
        pass
    slots = driver.core.state.pool.slots
    driver.core.set_steps_ahead(2)
    assert sorted(slots.end_step[slots.running_slots()].tolist()) == [7, 42]
    while driver.answer():
        pass
    driver.plan()
    assert (driver.plans[-1].step, slots.running) == (7, 1)
