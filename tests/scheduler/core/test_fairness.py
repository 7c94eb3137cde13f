"""Requests of several keys: each gets its share of slots, pages, tokens and time, and one key alone notices nothing."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.common.plan.codec import encode_plan
from services.scheduler.core.future.time_sharing import TimeSharing
from services.scheduler.core.queue.recent import RecentService
from services.scheduler.core.request import AdmissionMode, Priority
from tests.fakes.model import FakeShape
from tests.properties import examples
from tests.scheduler.core.driver import Driver, check_all

SHAPE = {
    "vocab_size": 62, "page_size": 4, "page_count": 2000, "max_slots": 32, "max_tokens_per_step": 128,
    "max_context_tokens": 512, "first_token": 2,
}  # fmt: skip


def driver(*, shape=None, **policy) -> Driver:
    made = Driver(FakeShape(**SHAPE | (shape or {})), **{"mode": AdmissionMode.PREDICTED, "margin": 0.0, **policy})
    made.core.state.queue.step_cost = 8.0
    return made


def flood(driver: Driver, count: int, *, key: str = "busy", length: int = 40, **fields) -> list[int]:
    """Requests of one key, each with a prompt of its own."""
    return [
        driver.submit([2 + number % 60, 2 + number // 60] * (length // 2), max_tokens=100, fairness_key=key, **fields)
        for number in range(count)
    ]


def steps_until_finished(driver: Driver, handle: int, most: int = 1000) -> list:
    """The plans that were built until a request has ended."""
    before = len(driver.plans)
    for _ in range(most):
        if driver.seen[handle].finish is not None:
            return driver.plans[before:]
        driver.step()
    raise AssertionError(f"not finished after {most} steps")


@pytest.mark.parametrize("steps", [1, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (3, 30)), 60])
def test_a_request_of_another_key_completes_in_few_and_short_steps(steps):
    busy = driver()
    flood(busy, 64)
    for _ in range(steps):
        busy.step()
    chat = busy.submit([3, 4, 5], max_tokens=4, fairness_key="other")
    plans = steps_until_finished(busy, chat)
    assert len(plans) <= 4 + 2 * busy.core.state.queue.steps_ahead
    check_all(busy)


def test_prompts_of_two_keys_share_each_step_though_nothing_waits():
    shared = driver()
    for key in ("one", "other"):
        shared.submit([3 + len(key)] * 300, max_tokens=4, fairness_key=key)
    shared.step()
    assert not shared.core.state.queue.waiting
    shared.run()
    begun, continued = shared.plans[1:3]
    assert begun.batch.token_counts.tolist() == [64, 64]
    assert continued.batch is None  # the same again
    check_all(shared)


@pytest.mark.parametrize(("length", "alone"), [(10, True), (40, False)])
def test_a_key_that_is_hardly_behind_runs_alone_only_if_that_completes_its_work(length, alone):
    busy = driver()
    flood(busy, 64)
    for _ in range(20):
        busy.step()
    state = busy.core.state
    state.queue.recent = RecentService()
    state.queue.recent.charge({"busy": 1200, "other": 800}, 10**6)
    busy.submit([3] * length, max_tokens=4, fairness_key="other")
    sharing = TimeSharing(state)
    served = [each.keys for _ in range(3) if (each := sharing.next()) is not None]
    assert ({"other"} in served) is alone


def test_a_request_of_another_key_takes_a_slot_at_once_and_the_busy_key_gets_it_back():
    busy = driver()
    lines = flood(busy, 64)
    for _ in range(40):
        busy.step()
    slots = busy.core.state.pool.slots
    assert slots.running == SHAPE["max_slots"]
    chat = busy.submit([3, 4, 5], max_tokens=4, fairness_key="other")
    busy.answer()
    busy.plan()
    assert busy.requests[chat].samples[0].slot >= 0
    assert busy.core.state.queue.counters.yields == 1
    steps_until_finished(busy, chat)
    busy.step()
    busy.step()
    assert slots.running == SHAPE["max_slots"]
    before = busy.model.prefilled_tokens
    check_all(busy)
    # What was computed of the sequence that made way is still cached: all but the last page, and its last token.
    assert busy.model.prefilled_tokens - before <= 40 * len(lines) // 2 + SHAPE["page_size"]


def test_a_request_of_another_key_takes_pages_at_once():
    busy = driver(shape={"page_count": 140})
    flood(busy, 8)
    for _ in range(40):
        busy.step()
    assert busy.core.state.queue.waiting
    chat = busy.submit([3] * 30, max_tokens=90, fairness_key="other")
    busy.answer()
    busy.plan()
    assert busy.requests[chat].samples[0].slot >= 0
    check_all(busy)


def test_guaranteed_sequences_are_never_preempted_for_keys():
    busy = driver(mode=AdmissionMode.GUARANTEED)
    flood(busy, 64)
    for _ in range(40):
        busy.step()
    busy.submit([3, 4, 5], max_tokens=4, fairness_key="other")
    check_all(busy)
    assert busy.core.state.queue.counters.yields == busy.core.state.queue.counters.preemptions == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("always_behind", [False, True])
def test_keys_do_not_take_the_only_slot_from_each_other_without_end(monkeypatch, always_behind, prefix_caching):
    """Though each key counts as behind whenever it waits, and a prompt that is interrupted begins again."""
    if always_behind:
        monkeypatch.setattr(RecentService, "behind", lambda recent, keys, part=0.5: set(keys))
    shape = {"page_size": 1, "page_count": 38, "max_slots": 4, "max_tokens_per_step": 1}
    both = driver(shape=shape, prefix_caching=prefix_caching)
    handles = [both.submit([number + 2] * 20, max_tokens=18, fairness_key=str(number)) for number in range(2)]
    both.run(2000)
    assert [len(both.seen[handle].tokens) for handle in handles] == [18, 18]
    assert both.core.state.queue.counters.yields <= 16


def test_recent_service_counts_steps_of_one_token():
    recent = RecentService()
    for _ in range(10):
        recent.charge({"busy": 1}, 1)
    assert recent.behind(["busy", "idle"]) == {"idle"}


@pytest.mark.parametrize("priority", [Priority.NORMAL, pytest.param(Priority.LOW, marks=pytest.mark.slow)])
def test_a_key_of_a_lower_class_neither_preempts_a_higher_one_nor_holds_it_back(priority):
    busy = driver()
    flood(busy, 64, priority=Priority.HIGH)
    for _ in range(40):
        busy.step()
    busy.submit([3, 4, 5], max_tokens=4, fairness_key="other", priority=priority)
    for _ in range(10):
        busy.step()
        assert busy.plans[-1].sequences == SHAPE["max_slots"]
    assert busy.core.state.queue.counters.yields == 0
    check_all(busy)


def test_chunks_of_prompts_of_two_keys_are_in_one_plan():
    both = driver()
    for key in ("first", "second"):
        both.submit([len(key)] * 400, max_tokens=2, fairness_key=key)
    both.plan()
    both.plan()
    assert len(both.plans[-1].batch.token_counts) == 2
    assert both.plans[-1].batch.token_counts.tolist() == [64, 64]
    check_all(both)


def test_one_key_is_planned_as_if_there_were_no_keys():
    """Whatever its requests are; the name of the key makes no difference either."""
    plans = []
    for key in ("", "somebody"):
        alone = driver(shape={"page_count": 150})
        for number in range(30):
            fields = {"n": 1 + number % 3, "priority": list(Priority)[number % 3]}
            alone.submit([2 + number] * (7 * number % 90 + 1), max_tokens=40, fairness_key=key, **fields)
            alone.step()
        check_all(alone)
        plans.append([encode_plan(plan).SerializeToString(deterministic=True) for plan in alone.plans])
    assert plans[0] == plans[1]


def served(driver: Driver) -> Counter:
    """Tokens computed for each key, of requests of one sample. The last token of an answer is only sampled."""
    found: Counter = Counter()
    for handle, request in driver.requests.items():
        tokens = driver.seen[handle].tokens
        found[request.fairness_key] += len(request.tokens) + len(tokens) - 1 if tokens else 0
    return found


@settings(max_examples=examples(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=2, max_size=3),
    st.integers(4, 8), st.sampled_from(list(AdmissionMode)),
)  # fmt: skip
@example([(1, 1), (1, 1), (1, 2)], 4, AdmissionMode.PREDICTED)  # the work of every key is always nearly complete
def test_keys_with_a_backlog_get_equal_service(kinds, slots, mode):
    """A plan admits at most as many as there are slots, so each key always waits. The bound is that of Sheng et al.
    (2024): twice what the slots hold, and a step of each."""
    keys = driver(shape={"max_slots": slots, "page_count": 25 * slots, "max_tokens_per_step": 32}, mode=mode)
    bound = 2 * slots * max(2 * length + limit for length, limit in kinds) + 2 * 32
    for _ in range(120):
        for number, (length, limit) in enumerate(kinds):
            while sum(each.request.fairness_key == str(number) for each in keys.core.state.queue.waiting) < 2 * slots:
                prompt = [2 + number, 2 + keys.next_handle % 60] * length
                keys.submit(prompt, max_tokens=limit, fairness_key=str(number), cache_salt=str(keys.next_handle))
        keys.step()
    amounts = [served(keys)[str(number)] for number in range(len(kinds))]
    assert max(amounts) - min(amounts) <= bound
    keys.cancel(*(handle for handle, seen in keys.seen.items() if seen.finish is None))
    check_cancelled(keys)


def check_cancelled(driver: Driver) -> None:
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == 0
    assert not driver.core.state.pool.running_keys.numbers
