"""Predicted sequences: more of them run, wrong predictions cost little, nothing is lost; guaranteed ones never pay."""

from itertools import chain

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core.future.admission import running_curve
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.life.victims import choose_victims
from services.scheduler.core.request import AdmissionMode, FinishReason, Priority
from tests.fakes.model import FakeShape
from tests.properties import examples
from tests.scheduler.core.driver import SINK, Driver

PREDICTED, GUARANTEED = AdmissionMode.PREDICTED, AdmissionMode.GUARANTEED
# Half of the tokens that the hash chooses end a sample that stops at them: answers of two tokens on average.
EARLY = frozenset(range(2, 32))
SHAPE = FakeShape(vocab_size=62, page_size=4, page_count=60, max_slots=32, max_tokens_per_step=128,
                  max_context_tokens=128, first_token=2)  # fmt: skip


def experienced(**policy) -> Driver:
    """A core that has seen many short answers."""
    driver = Driver(SHAPE, **{"mode": PREDICTED, "margin": 0.0, **policy})
    driver.submit([3, 4, 5], n=100, max_tokens=100, stop_token_ids=EARLY)
    driver.run()
    return driver


def most_running(driver: Driver) -> int:
    most = 0
    while driver.core.live(1):
        driver.step()
        most = max(most, driver.core.state.pool.slots.running)
    return most


def test_what_was_learnt_lets_more_sequences_run():
    running = {}
    for mode in (GUARANTEED, PREDICTED):
        driver = experienced()
        for number in range(20):
            driver.submit([30 + number] * 7, max_tokens=100, stop_token_ids=EARLY, mode=mode)
        running[mode] = most_running(driver)
    assert running[GUARANTEED] < 10
    assert running[PREDICTED] > 15


def test_an_unknown_class_runs_as_if_guaranteed():
    driver = experienced()
    for number in range(20):
        driver.submit([30 + number] * 7, max_tokens=100, stop_token_ids=EARLY, length_class="another")
    driver.plan()
    assert driver.core.state.pool.slots.running == 2  # of 27 pages each


def run_long(driver: Driver, count: int, **fields) -> list[int]:
    """Sequences of a class that always was short, and now run to their limits."""
    return [driver.submit([2 + number] * 7, max_tokens=100, **fields) for number in range(count)]


def test_wrong_predictions_preempt_and_lose_nothing():
    driver = experienced()
    handles = run_long(driver, 12)
    driver.run()
    counters = driver.core.state.queue.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    for handle in handles:
        assert (driver.seen[handle].tokens, driver.seen[handle].finish.reason) == driver.expected(handle)
    preempted = [name for plan in driver.plans for name in plan.preempted_ids]
    assert len(preempted) == counters.preemptions
    assert max(preempted.count(name) for name in set(preempted)) <= 2  # then a sample is guaranteed


def test_guaranteed_sequences_are_never_preempted_by_predicted_ones():
    driver = experienced()
    mixed = [run_long(driver, 3, mode=mode) for mode in (PREDICTED, GUARANTEED, PREDICTED, GUARANTEED)]
    driver.run()
    assert driver.core.state.queue.counters.preemptions > 0
    kept = {f"r{handle}" for handle in mixed[1] + mixed[3]}
    assert not kept & {name for plan in driver.plans for name in plan.preempted_ids}
    for handle in chain(*mixed):
        assert driver.seen[handle].tokens == driver.expected(handle)[0]


def test_guaranteed_classes_are_guaranteed_unless_the_request_says_otherwise():
    driver = experienced(guaranteed_classes=frozenset({Priority.HIGH}))
    handles = [
        driver.submit([9, 9], max_tokens=9, **fields)
        for fields in (
            {},
            {"priority": Priority.HIGH},
            {"priority": Priority.HIGH, "mode": PREDICTED},
            {"mode": GUARANTEED},
        )
    ]
    assert [driver.requests[handle].guaranteed for handle in handles] == [False, True, False, True]


def test_the_victim_has_the_least_work_to_lose():
    driver = experienced()
    old, young = driver.submit([9] * 6, max_tokens=90), None
    for _ in range(10):
        driver.step()
    young = driver.submit([8] * 6, max_tokens=90)
    for _ in range(3):
        driver.step()
    slots = {sample.handle: sample.slot for sample in driver.core.state.pool.slots.running_samples()}
    assert choose_victims(driver.core.state, 1).tolist() == [slots[young]]
    assert choose_victims(driver.core.state, 4).tolist() == [slots[young], slots[old]]
    low = driver.submit([7] * 40, max_tokens=50, priority=Priority.LOW)
    driver.step()
    low_slot = next(s.slot for s in driver.core.state.pool.slots.running_samples() if s.handle == low)
    assert choose_victims(driver.core.state, 1).tolist() == [low_slot]  # the lower class first, whatever it costs


def test_of_equal_work_the_latest_admitted_is_the_first_victim():
    driver = experienced()
    handles, length = [], 6
    for number in range(5):
        handles.append(driver.submit([9 + number] * length, max_tokens=90 - length))
        driver.plan()
        driver.answer()
        length += 1  # as many as those before have by the next plan
    slots, running = driver.core.state.pool.slots, driver.core.state.pool.slots.running_samples()
    assert len({int(slots.scheduled[sample.slot]) for sample in running}) == 1
    slot_of = {sample.handle: sample.slot for sample in running}
    assert choose_victims(driver.core.state, 10**6).tolist() == [slot_of[handle] for handle in reversed(handles)]


def test_sequences_whose_pages_are_all_in_the_tree_can_be_victims():
    driver = experienced()
    handles = [driver.submit([2 + number] * 8, max_tokens=60) for number in range(6)]
    driver.step()
    slots, tree = driver.core.state.pool.slots, driver.core.state.pool.tree
    active = np.flatnonzero(slots.active)
    assert (slots.page_count[active] - tree.depth[slots.node[active]]).max() <= 1
    assert len(choose_victims(driver.core.state, 12)) >= 3
    driver.run()
    assert all(driver.seen[handle].tokens == driver.expected(handle)[0] for handle in handles)


def test_shared_pages_of_a_victim_are_not_lost():
    driver = experienced()
    driver.submit([6] * 41, n=3, max_tokens=60)  # ten whole pages in common
    for _ in range(3):
        driver.step()
    before = driver.model.prefilled_tokens
    slots = driver.core.state.pool.slots
    victim = slots.running_samples()[-1]
    Lifecycle(driver.core.state).preempt(np.array([victim.slot]))
    known = victim.given
    driver.step()
    assert victim.slot >= 0
    assert driver.model.prefilled_tokens - before <= known - 40
    driver.run()
    assert all(driver.seen[h].tokens == driver.expected(h)[0] for h in driver.seen if driver.seen[h].finish.handle == h)


def test_a_leader_preempted_before_its_prompt_is_computed_lets_its_siblings_go():
    driver = experienced()
    handle = driver.submit([5] * 100, n=3, max_tokens=20)
    driver.core.state.pool.shape.__dict__["max_tokens_per_step"] = 32
    driver.plan()
    assert driver.core.state.pool.prefilling
    leader = driver.core.state.pool.slots.running_samples()[0]
    Lifecycle(driver.core.state).preempt(np.array([leader.slot]))
    driver.run()
    assert all(driver.seen[h].tokens == driver.expected(h)[0] for h in range(handle, handle + 3))


def test_a_wider_margin_leaves_more_pages_free():
    peaks = []
    for margin in (0.0, 1.0, 3.0):
        driver = experienced(margin=margin)
        for number in range(32):
            driver.submit([2 + number] * 18, max_tokens=100, stop_token_ids=EARLY)
        peak = 0
        while driver.core.live(SINK):
            driver.step()
            peak = max(peak, int(running_curve(driver.core.state, driver.core.state.pool.step).max()))
        peaks.append(peak)
    assert peaks[0] <= SHAPE.page_count
    assert peaks[0] > peaks[1] > peaks[2]


@settings(max_examples=examples(150, share=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 90), st.sampled_from([PREDICTED, GUARANTEED]), st.booleans(),
                       st.sampled_from([1, 1, 4])), min_size=1, max_size=20),
    st.integers(28, 80), st.integers(0, 3),
)  # fmt: skip
def test_every_sample_ends_as_if_alone_whatever_was_predicted(requests, pages, margin):
    """Classes that change from short to long and back, in a pool that is far too small."""
    driver = Driver(FakeShape(**{**SHAPE.__dict__, "page_count": pages}), mode=PREDICTED, margin=float(margin))
    driver.submit([3, 4, 5], n=40, max_tokens=100, stop_token_ids=EARLY)
    driver.run()
    handles = []
    for length, limit, mode, early, n in requests:
        stops = EARLY if early else frozenset()
        prompt = [2 + len(handles) % 50] * length
        limit = min(limit, pages * SHAPE.page_size - length)
        first = driver.submit(prompt, n=n, max_tokens=limit, mode=mode, stop_token_ids=stops)
        handles += range(first, first + n)
        driver.step()
    driver.run()
    for handle in handles:
        tokens, reason = driver.expected(handle)
        assert (driver.seen[handle].tokens, driver.seen[handle].finish.reason) == (tokens, reason)
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == 0


def test_a_leader_that_comes_back_gives_all_its_pages():
    driver = Driver(FakeShape(**{**SHAPE.__dict__, "max_slots": 2}), mode=PREDICTED)
    handle = driver.submit([2, 3, 4, 5, 6, 7], n=4, max_tokens=20)
    for _ in range(4):
        driver.step()
    leader = driver.requests[handle].samples[0]
    Lifecycle(driver.core.state).preempt(np.array([leader.slot]))
    driver.plan()
    assert leader.slot >= 0  # first of its kind, so back before its siblings
    driver.run()
    assert driver.core.state.pool.pages.in_use == 0
