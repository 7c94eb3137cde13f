"""What the worker says about its device, summed up."""

import dataclasses

import pytest

from services.common.plan.codec import decode_result, encode_plan
from services.common.plan.result import Timing
from services.scheduler.core.request import PauseMode
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import Driver
from tokasaurus.worker.v1 import plan_pb2

SHAPE = FakeShape(vocab_size=62, page_size=4, page_count=40, max_slots=4, max_tokens_per_step=64,
                  max_context_tokens=64, first_token=2)  # fmt: skip


@pytest.mark.parametrize("in_flight", [1, 2])
def test_idle_time_counts_only_while_there_is_work(in_flight):
    driver = Driver(SHAPE, steps_ahead=2)
    counters = driver.core.state.queue.counters
    for request in (1, 2):
        driver.submit([2, 3], max_tokens=4)
        driver.plan()
        while driver.in_flight:
            if len(driver.in_flight) < in_flight and driver.plan():
                continue
            driver.in_flight[0] = dataclasses.replace(driver.in_flight[0], timing=Timing(device=100, idle=7))
            driver.answer()
            driver.plan()
        assert counters.device_busy_ns == 100 * counters.steps == 100 * 4 * request
        assert counters.device_idle_ns == 7 * 3 * request  # all steps but the first


def test_a_worker_does_not_wait_during_a_pause():
    driver = Driver(SHAPE, steps_ahead=2)
    driver.submit([2, 3], max_tokens=4)
    driver.plan()
    driver.core.pause(PauseMode.KEEP)
    assert not driver.plan()
    driver.answer()
    driver.core.resume()
    driver.plan()
    driver.in_flight[0] = dataclasses.replace(driver.in_flight[0], timing=Timing(device=100, idle=7))
    driver.answer()
    assert driver.core.state.queue.counters.device_idle_ns == 0


def test_a_worker_does_not_wait_while_quarantined_samples_run_alone():
    driver = Driver(SHAPE, steps_ahead=2)
    for _ in range(2):
        driver.submit([2, 3], max_tokens=8)
    for _ in range(2):
        driver.plan()
        driver.lose_worker()
    for _ in range(2):
        assert driver.core.state.queue.quarantined is not None
        assert driver.plan()
        assert not driver.plan()  # one plan in flight, by choice
        driver.in_flight[0] = dataclasses.replace(driver.in_flight[0], timing=Timing(device=100, idle=7))
        driver.answer()
    assert driver.core.state.queue.counters.device_idle_ns == 0


def test_idle_time_is_late_unless_a_plan_was_queued():
    assert Timing(idle=9).late == 9
    assert Timing(idle=9, queued=2, prepare=30).late == 7
    assert Timing(idle=9, queued=11).late == 0


def test_a_result_s_device_time_is_read():
    timing = plan_pb2.StepTiming(device_ns=5, idle_ns=3)
    result = decode_result(plan_pb2.StepResult(step=1, timing=timing))
    assert (result.timing.device, result.timing.idle) == (5, 3)


def test_an_admission_has_the_prompt_length_of_a_resumed_sequence():
    driver = Driver(SHAPE)
    driver.submit([2, 3, 4], max_tokens=12)
    for _ in range(4):
        driver.step()
    assert [a.prompt_tokens for plan in driver.plans for a in encode_plan(plan).admissions] == [0]  # all of them
    driver.lose_worker()
    driver.plans.clear()
    driver.step()
    [admission] = encode_plan(driver.plans[0]).admissions
    assert admission.prompt_tokens == 3 < len(admission.token_ids)
