"""Rows of a plan: Hydragen groups are told when they change, join late comers, and stay within micro-batches."""

import math
from collections import Counter

import numpy as np

from services.scheduler.core.counters import STEP_SIZES
from services.scheduler.core.memory.hydragen import HydragenPolicy, choose_groups
from services.scheduler.core.step import batching
from services.scheduler.engine.load import read_load
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import Driver

SHAPE = FakeShape(vocab_size=62, page_size=4, page_count=800, max_slots=64, max_tokens_per_step=256,
                  max_context_tokens=256, first_token=2)  # fmt: skip
ALL = HydragenPolicy(min_group_size=4, min_prefix_len=8, row_cost=0, group_cost=0, call_cost=0)
FIRST, SECOND = [2 + index % 50 for index in range(43)], [51 - index % 40 for index in range(30)]


def test_samples_of_a_prompt_decode_as_one_group_that_is_sent_once():
    driver = Driver(SHAPE, hydragen=ALL)
    driver.submit(FIRST, n=20, max_tokens=12)
    driver.run()
    together = [plan for plan in driver.plans if plan.sequences == 20 and not plan.prefill_tokens]
    assert len(together) > 5
    assert (together[0].groups.counts.tolist(), together[0].groups.prefix_pages.tolist()) == ([20], [10])
    assert all(plan.groups is None for plan in together[1:])
    assert {plan.hydragen_rows for plan in together} == {20}


def test_a_late_comer_joins_the_group_of_its_prefix(monkeypatch):
    chosen = []
    monkeypatch.setattr(batching, "choose_groups", lambda *how: chosen.append(how) or choose_groups(*how))
    driver = Driver(SHAPE, hydragen=ALL)
    driver.submit(FIRST, n=40, max_tokens=60)
    for _ in range(4):
        driver.step()
    driver.submit([*FIRST, 9, 9], max_tokens=30)  # one in forty: no reason to choose groups anew
    before = len(chosen)
    assert before > 0
    for _ in range(3):
        driver.step()
    assert len(chosen) == before
    assert driver.plans[-1].hydragen_rows == 41


def test_groups_stay_within_balanced_micro_batches():
    driver = Driver(SHAPE, hydragen=ALL, micro_batches=3)
    driver.submit(FIRST, n=20, max_tokens=40)
    driver.submit(SECOND, n=13, max_tokens=40)
    for _ in range(6):
        driver.step()
    parts = next(plan.micro_batch_rows for plan in reversed(driver.plans) if plan.batch is not None)
    groups = next(plan.groups for plan in reversed(driver.plans) if plan.groups is not None)
    starts, counts, pages = groups.starts, groups.counts, groups.prefix_pages
    assert parts == (11, 11, 11)
    edges = np.cumsum(parts)
    assert (np.searchsorted(edges, starts, "right") == np.searchsorted(edges, starts + counts - 1, "right")).all()
    assert sorted(set(pages.tolist())) == [7, 10]
    assert driver.core.state.queue.counters.hydragen_rows > 0
    driver.run()
    assert all(seen.tokens == driver.expected(handle)[0] for handle, seen in driver.seen.items())


def test_groups_that_would_not_pay_are_not_made():
    driver = Driver(SHAPE, hydragen=HydragenPolicy(min_group_size=4, min_prefix_len=8))
    driver.submit(FIRST, n=20, max_tokens=12)
    driver.run()
    assert driver.core.state.queue.counters.hydragen_rows == 0


def test_a_light_plan_leaves_admissions_to_a_later_plan_a_few_times():
    driver = Driver(SHAPE)
    driver.submit(FIRST, max_tokens=60)
    driver.step()
    driver.step()
    late = driver.submit(SECOND, max_tokens=5)
    postponed = []
    while driver.core.state.queue.waiting:
        postponed.append(driver.plan(light=True).postponed)
        driver.answer()
    assert postponed == [True, True, True, False]
    assert driver.core.state.queue.counters.postponed_plans == 3
    driver.run()
    assert driver.seen[late].tokens == driver.expected(late)[0]


def test_steps_are_counted_by_their_tokens():
    driver = Driver(SHAPE)
    driver.submit(FIRST, n=3, max_tokens=12)
    driver.submit(SECOND, max_tokens=30)
    driver.run()
    load = read_load(driver.core.state, not_ready_reason="", plans_in_flight=0, step_s=0.0, forecast=())
    counted = Counter(math.ceil(math.log2(plan.tokens)) for plan in driver.plans)  # at most 1, 2, 4, ... tokens
    assert dict(enumerate(load.steps_by_tokens)) == {size: counted[size] for size in range(STEP_SIZES)}
    assert len(counted) > 2
