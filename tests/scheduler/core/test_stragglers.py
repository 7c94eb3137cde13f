"""Stragglers of a group end with their tokens, or run only where no other sample needs their slots and pages."""

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.scheduler.core.future.estimate import estimate, running_steps
from services.scheduler.core.life.victims import choose_victims
from services.scheduler.core.request import AdmissionMode, FinishReason, PauseMode, Priority
from tests.fakes.model import FakeShape
from tests.properties import examples
from tests.scheduler.core.driver import SINK, Driver, check_all
from tests.scheduler.core.test_histories import policies, requests, shapes

PROMPT = [2, 3, 4, 5, 6, 7, 8, 9, 10]
EOS = frozenset({0})
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


def shape(**fields) -> FakeShape:
    sizes = {"vocab_size": 62, "page_size": 4, "page_count": 400, "max_slots": 24, "max_tokens_per_step": 64}
    more = {"max_context_tokens": 100, "first_token": 2, "eos_token_id": 0, "eos_every": 12}
    return FakeShape(**{**sizes, **more, **fields})


def reasons(driver: Driver, handle: int) -> list[FinishReason]:
    request = driver.requests[handle]
    return [driver.seen[each].finish.reason for each in range(handle, handle + request.n)]


def begin(driver: Driver, n: int, **fields) -> int:
    """Submit samples of different lengths, and run until every sample with a slot has a token."""
    handle = driver.submit(PROMPT, n=n, max_tokens=80, stop_token_ids=EOS, **fields)
    for _ in range(4):
        driver.step()
    return handle


def park(driver: Driver, *handles: int) -> None:
    driver.core.park(SINK, handles)
    driver.collect()


def parked_running(driver: Driver) -> int:
    slots = driver.core.state.pool.slots
    return int(np.count_nonzero(slots.parked[slots.running_slots()]))


# -- the end of a group


@pytest.mark.parametrize("after", [1, 7, 15, 16])
def test_the_rest_of_a_group_ends_with_its_tokens(after):
    driver = Driver(shape())
    handle = driver.submit(PROMPT, n=16, max_tokens=80, stop_token_ids=EOS, end_after=after)
    other = driver.submit([20, 21], n=2, max_tokens=60)
    driver.run()
    ended = reasons(driver, handle)
    # The first sample computes the prompt, and is a step ahead. Samples that finish in the same step all count.
    steps = [len(driver.expected(each)[0]) + (each > handle) for each in range(handle, handle + 16)]
    last = sorted(steps)[after - 1]
    assert [each in COMPLETE for each in ended] == [step <= last for step in steps]
    for each in range(handle, handle + 16):
        seen, (tokens, reason) = driver.seen[each], driver.expected(each)
        if seen.finish.reason is FinishReason.ABORTED:
            assert seen.tokens == tokens[: len(seen.tokens)]
            assert len(seen.tokens) == last - (each > handle)
        else:
            assert (seen.tokens, seen.finish.reason) == (tokens, reason)
    assert reasons(driver, other) == [FinishReason.LENGTH] * 2


def test_samples_that_have_not_begun_end_without_tokens():
    driver = Driver(shape(max_slots=2))
    handle = driver.submit(PROMPT, n=6, max_tokens=5, end_after=2)
    driver.run()
    assert reasons(driver, handle) == [FinishReason.LENGTH] * 2 + [FinishReason.ABORTED] * 4
    assert [len(driver.seen[each].tokens) for each in range(handle, handle + 6)] == [5, 5, 0, 0, 0, 0]


def test_cancelled_samples_do_not_count_as_finished():
    driver = Driver(shape(eos_every=0))
    handle = driver.submit(PROMPT, n=4, max_tokens=20, end_after=2)
    driver.step()
    driver.cancel(handle, handle + 1)
    driver.run()
    assert reasons(driver, handle) == [FinishReason.CANCELLED] * 2 + [FinishReason.LENGTH] * 2


def test_a_session_ends_single_samples():
    driver = Driver(shape(eos_every=0))
    handle = begin(driver, 3)
    driver.core.end(SINK, [handle, handle + 2, 99])
    driver.run()
    assert reasons(driver, handle) == [FinishReason.ABORTED, FinishReason.LENGTH, FinishReason.ABORTED]
    assert driver.seen[handle].tokens


# -- parked samples


def test_parked_samples_without_others_run_to_their_ends():
    driver = Driver(shape())
    driver.submit(PROMPT, n=16, max_tokens=80, stop_token_ids=EOS, park_after=8)
    check_all(driver)
    assert driver.core.state.queue.counters.yields == 0


@pytest.mark.parametrize("priority", list(Priority))
@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_a_parked_sample_leaves_its_slot_to_any_other_sample(priority, mode):
    driver = Driver(shape(max_slots=4, eos_every=0))
    handle = begin(driver, 4, mode=mode, priority=Priority.HIGH)
    park(driver, handle)
    assert parked_running(driver) == 4
    later = driver.submit([20, 21], max_tokens=3, priority=priority)
    plan = driver.plan()
    assert plan.admitted_ids == [f"r{later}"]
    assert (parked_running(driver), driver.core.state.queue.waiting.parked) == (3, 1)
    assert driver.core.state.queue.counters.yields == 1
    check_all(driver)


def test_several_samples_take_the_slots_of_parked_ones_at_once():
    driver = Driver(shape(max_slots=2, eos_every=0))
    park(driver, begin(driver, 2))
    later = driver.submit([20, 21], n=2, max_tokens=4)
    driver.step()
    driver.step()
    assert [sample.slot >= 0 for sample in driver.requests[later].samples] == [True, True]
    check_all(driver)


def test_a_parked_sample_leaves_its_pages_to_any_other_sample():
    driver = Driver(shape(page_count=12, max_slots=4, eos_every=0, max_context_tokens=40))
    handle = driver.submit(PROMPT, n=2, max_tokens=14)
    for _ in range(4):
        driver.step()
    park(driver, handle)
    later = driver.submit([20] * 20, max_tokens=19, priority=Priority.LOW)
    assert driver.plan().admitted_ids == [f"r{later}"]
    check_all(driver)


def test_parked_samples_and_those_of_class_low_leave_their_pages_together():
    driver = Driver(shape(page_count=20, max_slots=4, eos_every=0))
    parked = driver.submit(PROMPT, max_tokens=27)
    driver.submit([30] * 9, max_tokens=27, priority=Priority.LOW, mode=AdmissionMode.PREDICTED)
    for _ in range(4):
        driver.step()
    park(driver, parked)
    later = driver.submit([20] * 30, max_tokens=30, priority=Priority.HIGH)  # needs more pages than one of them has
    assert driver.plan().admitted_ids == [f"r{later}"]
    check_all(driver)


def test_a_parked_sample_waits_while_another_sample_waits():
    driver = Driver(shape(max_slots=2, eos_every=0))
    handle = begin(driver, 2)
    park(driver, handle)
    later = [driver.submit([20 + each, 21], max_tokens=4 + each) for each in range(6)]
    while driver.core.live(SINK):
        driver.step()
    admitted = [name for plan in driver.plans for name in plan.admitted_ids]
    assert admitted[2:8] == [f"r{each}" for each in later]
    assert admitted[8:] == [f"r{handle}"] * 2
    check_all(driver)


def test_a_parked_sequence_is_the_first_victim_although_it_has_a_higher_class_and_more_work():
    driver = Driver(shape(eos_every=0), mode=AdmissionMode.PREDICTED)
    high = driver.submit(PROMPT, max_tokens=60, priority=Priority.HIGH)
    for _ in range(20):
        driver.step()
    low = driver.submit([20, 21], max_tokens=60, priority=Priority.LOW)
    for _ in range(4):
        driver.step()
    slots = {handle: driver.requests[handle].samples[0].slot for handle in (high, low)}
    assert choose_victims(driver.core.state, 1).tolist() == [slots[low]]
    park(driver, high)
    assert choose_victims(driver.core.state, 1).tolist() == [slots[high]]
    check_all(driver)


def test_parked_work_is_no_load():
    driver = Driver(shape(max_slots=2, eos_every=0))
    handle = begin(driver, 4)
    park(driver, handle)
    state = driver.core.state
    assert (state.queue.waiting.parked, state.queue.waiting.tokens, state.pool.slots.outstanding_tokens()) == (2, 0, 0)
    check_all(driver)


def test_a_pause_that_waits_includes_parked_samples():
    driver = Driver(shape(max_slots=1, eos_every=0))
    handle = begin(driver, 3)
    park(driver, handle)
    driver.pause(PauseMode.WAIT)
    late = driver.submit([20, 21], max_tokens=4)
    while driver.plan() or driver.answer():
        pass
    assert driver.core.is_paused
    assert reasons(driver, handle) == [FinishReason.LENGTH] * 3
    assert driver.seen[late].finish is None
    driver.core.resume()
    check_all(driver)


@pytest.mark.parametrize("recompute", [False, True])
def test_parked_samples_outlive_a_pause_and_a_worker(recompute):
    driver = Driver(shape(max_slots=3, eos_every=0))
    handle = begin(driver, 5)
    park(driver, handle)
    driver.pause(PauseMode.KEEP, recompute=recompute)
    driver.lose_worker()
    later = driver.submit([20, 21], n=3, max_tokens=4)
    driver.core.resume()
    assert driver.plan().admitted_ids[0] == f"r{later}"
    check_all(driver)


def test_a_light_plan_admits_no_sample_that_was_first_before_it_was_parked():
    """A plan before it had preempted sequences for this sample, whose key had none."""
    sizes = dict.fromkeys(("page_size", "page_count", "max_slots", "max_tokens_per_step"), 1)
    driver = Driver(shape(**sizes, max_context_tokens=8, eos_every=0), mode=AdmissionMode.PREDICTED)
    for key in ("", "", "someone"):
        driver.submit([2], fairness_key=key)
    driver.step()
    assert driver.core.state.queue.first
    driver.lose_worker()
    park(driver, *range(driver.next_handle))
    other = driver.submit([2])
    assert driver.plan(light=True).admitted_ids == [f"r{other}"]


@pytest.mark.timeout(600)
@settings(max_examples=examples(600, share=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), policy=policies)
def test_stragglers_in_random_histories(data, policy):
    """A parked sample is admitted only if no other could be, and a group ends when enough samples have finished."""
    driver = Driver(data.draw(shapes()), **policy)
    waiting = driver.core.state.queue.waiting
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["submit", "submit", "plan", "light", "step", "step", "lose", "park", "end"])):
            case "submit":
                fields = data.draw(requests())
                after = st.none() | st.integers(1, fields["n"])
                with contextlib.suppress(InvalidRequest):
                    driver.submit(**fields, end_after=data.draw(after), park_after=data.draw(after))
            case "plan" | "light" as move:
                others = [each for each in waiting if not each.request.parked]
                parked = {each.request_id for each in driver.requests.values() if each.parked}
                plan = driver.plan(light=move == "light")
                if plan is not None and driver.core.state.queue.quarantined is None:
                    assert not others or parked.isdisjoint(plan.admitted_ids)
            case "step":
                driver.step()
            case "lose":
                driver.lose_worker()
            case "park":
                park(driver, *range(driver.next_handle))
            case "end":
                driver.core.end(SINK, [data.draw(st.integers(0, 30))])
                driver.collect()
    driver.run()
    for handle, request in driver.requests.items():
        ended = reasons(driver, handle)
        complete = sum(each in COMPLETE for each in ended)
        assert request.completed == complete
        if request.end_after is not None and complete >= request.end_after:
            continue
        assert all(each in (*COMPLETE, FinishReason.ABORTED, FinishReason.ERROR) for each in ended)
    for handle, seen in driver.seen.items():
        tokens, reason = driver.expected(handle)
        assert seen.tokens == tokens[: len(seen.tokens)]
        assert seen.finish.reason not in COMPLETE or (seen.tokens, seen.finish.reason) == (tokens, reason)
        assert seen.finish.completion_tokens == len(seen.tokens)
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == driver.core.state.pool.slots.running == 0
    assert not driver.core.state.queue.requests
    assert not driver.core.state.pool.slots.active.any()


# -- the tail of a group


def test_rows_and_steps_of_a_tail_are_counted():
    driver = Driver(shape(eos_every=0))
    counters = driver.core.state.queue.counters
    driver.submit(PROMPT, max_tokens=10)  # a single sample is no group
    driver.run()
    assert (counters.tail_rows, counters.tail_steps) == (0, 0)
    handle = begin(driver, 20)
    driver.core.end(SINK, range(handle, handle + 17))
    driver.step()
    assert counters.tail_rows == 0
    driver.core.end(SINK, [handle + 17])  # two of twenty are left
    before = counters.steps
    driver.step()
    rows = 2 * (counters.steps - before)
    assert (counters.tail_rows, counters.tail_steps) == (rows, rows // 2)
    driver.submit([20, 21], max_tokens=30)
    before, tail_rows, tail_steps = counters.steps, counters.tail_rows, counters.tail_steps
    driver.step()
    assert counters.tail_rows - tail_rows == 2 * (counters.steps - before)
    assert counters.tail_steps == tail_steps
    check_ends(driver)


def check_ends(driver: Driver) -> None:
    driver.run()
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == 0


# -- the forecast of a group


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), policy=policies)
def test_the_ends_of_a_group_are_those_of_the_forecast(data, policy):
    driver = Driver(data.draw(shapes()), **policy)
    for _ in range(data.draw(st.integers(1, 20))):
        match data.draw(st.sampled_from(["submit", "submit", "step", "plan"])):
            case "submit":
                with contextlib.suppress(InvalidRequest):
                    driver.submit(**data.draw(requests()))
            case "step":
                driver.step()
            case "plan":
                driver.plan()
    state = driver.core.state
    for request in list(state.queue.requests.values()):
        found = estimate(state, request)
        assert len(found.ends) == request.n
        assert found.ends.tolist() == sorted(found.ends.tolist())
        assert found.ends[-1] == found.finish
        finished = sum(sample.finished for sample in request.samples)
        assert not found.ends[:finished].any()
        running = np.array([each.slot for each in request.samples if each.slot >= 0 and not each.finished], np.int64)
        assert set(running_steps(state, running)[1].tolist()) <= set(found.ends.tolist())


def test_expected_ends_are_exact_if_lengths_are_known():
    """Every sample has a slot, so nothing but its length decides when it ends."""
    driver = Driver(shape(eos_every=0))
    handles = [driver.submit(PROMPT, n=4, max_tokens=10 + 7 * each) for each in range(3)]
    for _ in range(4):
        driver.step()
    state = driver.core.state
    expected = {handle: estimate(state, driver.requests[handle]).ends for handle in handles}
    for index, handle in enumerate(handles):
        assert expected[handle].tolist() == sorted(
            10 + 7 * index - len(driver.seen[handle + each].tokens) for each in range(4)
        )


def test_parked_samples_that_wait_do_not_delay_the_forecast_of_another():
    ends = []
    for n in (3, 5000):
        driver = Driver(shape(max_slots=2, eos_every=0), max_queued=6000)
        park(driver, begin(driver, n))
        later = driver.submit([20, 21], n=600, max_tokens=4)
        driver.cancel(*range(later, later + 600))  # its forecast is that of a request that was not submitted
        ends.append(estimate(driver.core.state, driver.requests[later]).finish)
    assert ends[0] == ends[1]
