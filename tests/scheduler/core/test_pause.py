"""Pauses of the core, and resets of its prefix cache."""

import pytest

from services.scheduler.core.request import FinishReason, PauseMode
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import Driver, check_all

SHAPE = FakeShape(
    vocab_size=62, page_size=4, page_count=64, max_slots=4, max_tokens_per_step=16, max_context_tokens=64,
    first_token=2, eos_token_id=0, eos_every=0,
)  # fmt: skip
PROMPT = [2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture
def driver():
    return Driver(SHAPE)


def settle(driver: Driver) -> None:
    """Run until the core makes no plan and none is in flight."""
    while driver.plan() or driver.answer():
        pass


def test_a_pause_begins_when_the_plans_in_flight_have_results(driver):
    driver.submit(PROMPT, max_tokens=20)
    driver.plan()
    driver.pause(PauseMode.KEEP)
    assert driver.plan() is None
    assert not driver.core.is_paused
    driver.answer()
    assert driver.core.is_paused
    assert not driver.core.stuck


@pytest.mark.parametrize("recompute", [False, True])
def test_a_kept_sample_continues_with_its_tokens(driver, recompute):
    handle = driver.submit(PROMPT, max_tokens=20)
    for _ in range(5):
        driver.step()
    driver.pause(PauseMode.KEEP, recompute=recompute)
    settle(driver)
    before = len(driver.seen[handle].tokens)
    later = driver.submit([11, 12], max_tokens=3)
    settle(driver)
    assert (len(driver.seen[handle].tokens), driver.seen[later].tokens) == (before, [])
    assert driver.core.state.pool.slots.running == (0 if recompute else 1)
    driver.core.resume()
    check_all(driver)


def test_waiting_finishes_accepted_requests_and_starts_no_later_one(driver):
    early = [driver.submit(PROMPT, n=7, max_tokens=8), driver.submit([20, 21], max_tokens=5)]
    driver.step()
    driver.pause(PauseMode.WAIT)
    late = driver.submit(PROMPT, n=2, max_tokens=8, fairness_key="other")
    assert not driver.core.is_paused
    settle(driver)
    assert driver.core.is_paused
    assert all(
        driver.seen[handle].finish for first, n in zip(early, (7, 1), strict=True) for handle in range(first, first + n)
    )
    assert driver.seen[late].tokens == []
    driver.core.resume()
    check_all(driver)


def test_a_preempted_sample_finishes_before_a_waiting_pause_begins(driver):
    handle = driver.submit(PROMPT, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.pause(PauseMode.WAIT, recompute=True)
    driver.submit([30, 31], max_tokens=4)
    settle(driver)
    assert driver.seen[handle].finish.reason is FinishReason.LENGTH


def test_an_abort_ends_running_and_waiting_samples_with_their_tokens(driver):
    first = driver.submit(PROMPT, n=6, max_tokens=20)  # two of them wait
    for _ in range(5):
        driver.step()
    assert driver.pause(PauseMode.ABORT) == 6
    settle(driver)
    for handle in range(first, first + 6):
        seen, (expected, _) = driver.seen[handle], driver.expected(handle)
        assert seen.finish.reason is FinishReason.ABORTED
        assert seen.finish.completion_tokens == len(seen.tokens) < 20
        assert seen.tokens == expected[: len(seen.tokens)]
    assert driver.core.is_paused
    later = driver.submit(PROMPT, max_tokens=4)
    assert driver.plan() is None
    driver.core.resume()
    driver.run()
    assert driver.seen[later].finish.reason is FinishReason.LENGTH


def test_another_pause_replaces_the_first(driver):
    handle = driver.submit(PROMPT, max_tokens=20)
    driver.step()
    driver.pause(PauseMode.KEEP)
    settle(driver)
    driver.pause(PauseMode.WAIT)
    assert not driver.core.is_paused
    settle(driver)
    assert driver.core.is_paused
    assert driver.seen[handle].finish.reason is FinishReason.LENGTH


def test_a_pause_outlives_the_worker(driver):
    driver.submit(PROMPT, max_tokens=20)
    for _ in range(3):
        driver.step()
    driver.pause(PauseMode.KEEP)
    driver.lose_worker()
    assert driver.core.is_paused
    assert driver.plan() is None
    driver.core.resume()
    check_all(driver)


def test_a_prompt_after_a_reset_is_computed_again(driver):
    def cached() -> int:
        handle = driver.submit(PROMPT, max_tokens=2)
        driver.run()
        return driver.seen[handle].finish.cached_prompt_tokens

    assert (cached(), cached()) == (0, 8)
    pages = driver.core.state.pool.pages.cached
    assert driver.core.reset_prefix_cache() == pages > 0
    assert driver.core.state.pool.pages.cached == 0
    assert (cached(), cached()) == (0, 8)


def test_a_sequence_that_ran_during_a_reset_caches_nothing(driver):
    driver.submit(PROMPT, max_tokens=20)
    driver.step()
    assert driver.core.reset_prefix_cache() == 0
    driver.run()
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.cached == 0
    later = driver.submit(PROMPT, max_tokens=2)
    driver.run()
    assert driver.seen[later].finish.cached_prompt_tokens == 0


@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("recompute", [False, True])
def test_samples_that_wait_for_a_shared_prompt_during_a_reset_compute_it_again(size, recompute):
    driver = Driver(SHAPE)
    driver.submit(PROMPT[:size], n=6, max_tokens=20)  # two of them wait
    for _ in range(5):
        driver.step()
    assert driver.core.state.pool.sharing
    before = len(driver.plans)
    if recompute:
        driver.pause(PauseMode.KEEP, recompute=True)
        settle(driver)
        driver.core.resume()
    else:
        driver.core.reset_prefix_cache()
    driver.run()
    assert next(each.cached_tokens for plan in driver.plans[before:] for each in plan.admissions) == 0
    check_all(driver)
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == 0


def test_new_weights_of_the_same_version_reset_the_cache():
    driver = Driver(SHAPE)
    driver.core.change_weights("same")
    driver.submit(PROMPT, max_tokens=2)
    driver.run()
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.cached
    driver.core.change_weights("same")
    assert not driver.core.state.pool.pages.cached


def test_a_waiting_pause_that_has_begun_computes_no_canary(driver):
    """After three losses in a row, the next worker computes a sample of no client first."""
    handle = driver.submit(PROMPT, max_tokens=20)
    for _ in range(3):
        driver.plan()
        driver.lose_worker()
    driver.cancel(handle)
    driver.pause(PauseMode.WAIT)
    assert driver.core.is_paused
    assert driver.plan() is None
    driver.core.resume()
    assert driver.plan() is not None
    driver.run()
