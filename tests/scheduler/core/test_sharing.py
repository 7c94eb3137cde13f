"""Prefixes: shared by samples, reused by requests, kept apart by salts, evicted when unused."""

import numpy as np
import pytest

from services.common.errors import AlreadyExists, InvalidRequest, Overloaded
from services.common.plan.result import SlotFailure, StepResult
from services.common.plan.result_rules import BrokenResult
from services.common.plan.top_logprobs import TopLogprobs
from services.common.plan.types import SamplingSettings
from services.scheduler.core.future import estimate
from services.scheduler.core.life.intake import Intake
from services.scheduler.core.memory.prefix_tree import ROOT
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import FinishReason, Priority
from services.scheduler.core.scheduler import Scheduler
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import SINK, Driver
from tokasaurus.common.v1.sampling_pb2 import Sampling

SHAPE = FakeShape(vocab_size=62, page_size=4, page_count=400, max_slots=64, max_tokens_per_step=128,
                  max_context_tokens=256, first_token=2)  # fmt: skip
PROMPT = [2 + index % 50 for index in range(43)]


def test_samples_prefill_their_prompt_once_and_use_its_pages_once():
    driver = Driver(SHAPE)
    driver.submit(PROMPT, n=40, max_tokens=3)
    driver.step()  # two plans: the prompt, then all its siblings
    state = driver.core.state
    assert state.pool.slots.running == 40
    assert driver.model.prefilled_tokens == len(PROMPT) + 39  # each sibling computes the last token only
    assert state.pool.pages.in_use == 11 + 39  # ten whole pages for all, the eleventh for each
    driver.run()
    assert [driver.seen[handle].tokens for handle in range(40)] == [driver.expected(handle)[0] for handle in range(40)]
    cached = [driver.seen[handle].finish.cached_prompt_tokens for handle in range(40)]
    assert cached == [0] + [42] * 39


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_prompt_is_prefilled_once_though_its_samples_run_one_after_the_other(slots, prefix_caching):
    driver = Driver(FakeShape(**{**SHAPE.__dict__, "max_slots": slots}), prefix_caching=prefix_caching)
    driver.submit(PROMPT, n=8, max_tokens=3)
    driver.run()
    assert driver.model.prefilled_tokens == len(PROMPT) + 7
    cached = [driver.seen[handle].finish.cached_prompt_tokens for handle in range(8)]
    assert cached == [0] + [42] * 7


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 43])
def test_samples_of_prompts_of_any_length_have_the_tokens_of_running_alone(length):
    driver = Driver(SHAPE)
    handle = driver.submit(PROMPT[:length], n=5, max_tokens=9)
    driver.run()
    for index in range(handle, handle + 5):
        assert driver.seen[index].tokens == driver.expected(index)[0]


def test_a_second_request_prefills_only_what_is_new():
    driver = Driver(SHAPE)
    driver.submit(PROMPT, max_tokens=2)
    driver.run()
    before = driver.model.prefilled_tokens
    again = driver.submit([*PROMPT, 7, 8], max_tokens=2)
    driver.run()
    assert driver.model.prefilled_tokens - before == 5  # 45 tokens, ten whole pages known
    assert driver.seen[again].finish.cached_prompt_tokens == 40


def test_an_answer_is_part_of_the_prefix_of_the_next_turn():
    driver = Driver(SHAPE)
    first = driver.submit(PROMPT, max_tokens=30)
    driver.run()
    turn = [*PROMPT, *driver.seen[first].tokens, 9]
    second = driver.submit(turn, max_tokens=2)
    driver.run()
    assert driver.seen[second].finish.cached_prompt_tokens == 72  # 73 tokens are in the cache, 72 in whole pages


def test_requests_that_arrive_together_prefill_their_common_prefix_once():
    driver = Driver(SHAPE)
    for _ in range(10):
        driver.submit(PROMPT, max_tokens=2)
    driver.run()
    assert driver.model.prefilled_tokens == len(PROMPT) + 9 * 3


def test_many_requests_are_admitted_together_after_their_leaders_left():
    """The page a group's last sample is copied from is free behind it, and must not be copied onto in the same plan."""
    driver = Driver(SHAPE, steps_ahead=2)
    groups = [driver.submit([*PROMPT[: 5 + number], number + 5], n=9, max_tokens=2) for number in range(20)]
    driver.run()
    for first in groups:
        for handle in range(first, first + 9):
            assert driver.seen[handle].tokens == driver.expected(handle)[0]


def test_salts_keep_prefixes_apart():
    driver = Driver(SHAPE)
    driver.submit(PROMPT, max_tokens=2, cache_salt="one")
    driver.run()
    other = driver.submit(PROMPT, max_tokens=2, cache_salt="two")
    driver.run()
    assert driver.seen[other].finish.cached_prompt_tokens == 0


def test_without_prefix_caching_requests_share_nothing_and_samples_still_do():
    driver = Driver(SHAPE, prefix_caching=False)
    driver.submit(PROMPT, n=3, max_tokens=2)
    driver.run()
    again = driver.submit(PROMPT, max_tokens=2)
    driver.run()
    assert driver.seen[again].finish.cached_prompt_tokens == 0
    assert driver.model.prefilled_tokens == 2 * len(PROMPT) + 2
    assert driver.core.state.pool.pages.free == SHAPE.page_count


def test_the_prefix_unused_longest_is_evicted_first():
    shape = FakeShape(vocab_size=62, page_size=4, page_count=12, max_slots=4, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    for start in (2, 12, 22):
        driver.submit([start + index for index in range(9)], max_tokens=1)
        driver.run()
    driver.submit([2 + index for index in range(9)], max_tokens=1)  # used again: the second is oldest now
    driver.run()
    driver.submit([33] * 33, max_tokens=1)  # nine pages: six were cached, six free
    driver.run()
    kept = {}
    for start in (2, 12):
        handle = driver.submit([start + index for index in range(9)], max_tokens=1)
        driver.run()
        kept[start] = driver.seen[handle].finish.cached_prompt_tokens
    assert kept[12] == 0


def test_a_cancelled_prefill_frees_its_pages():
    driver = Driver(SHAPE)
    handle = driver.submit([3] * 200, max_tokens=2)
    driver.plan()
    assert driver.core.state.pool.prefilling
    driver.cancel(handle)
    assert driver.core.state.pool.pages.in_use == 0
    assert driver.seen[handle].finish.reason is FinishReason.CANCELLED
    after = driver.submit(PROMPT, max_tokens=4)
    driver.run()
    assert driver.seen[after].tokens == driver.expected(after)[0]


def test_a_sample_cancelled_twice_at_once_ends_once():
    driver = Driver(SHAPE)
    handle = driver.submit(PROMPT, n=2, max_tokens=2)
    driver.step()
    driver.cancel(handle, handle, handle + 1)
    assert driver.core.state.queue.counters.sequences_finished == 2


def test_a_lost_worker_costs_nothing_but_the_time():
    driver = Driver(SHAPE)
    handle = driver.submit(PROMPT, n=6, max_tokens=40, stop=("dbcbda",))
    for _ in range(15):
        driver.step()
    driver.lose_worker()
    driver.run()
    for index in range(handle, handle + 6):
        assert driver.seen[index].tokens == driver.expected(index)[0]
    assert driver.core.state.queue.counters.recomputed_tokens > 0


@pytest.mark.parametrize(
    "wrong",
    [{"slots": [64]}, {"tokens": [62]}, {"tokens": [5, 6]}, {"logprobs": [0.0, 0.0]}, {"top": TopLogprobs.none(2)},
     {"top": TopLogprobs(np.ones(1, np.int64), *np.zeros((2, 0)))},
     {"slots": [], "tokens": [], "failures": (SlotFailure(64, ""),)}],
)  # fmt: skip
def test_an_inconsistent_result_is_rejected_completely(wrong):
    driver = Driver(SHAPE)
    driver.submit(PROMPT, max_tokens=9)
    driver.core.plan(1)
    fields = {"slots": [63], "tokens": [5], **wrong}
    kinds = {"logprobs": np.float32}
    arrays = {
        name: np.array(value, kinds.get(name, np.int64)) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    with pytest.raises(
        BrokenResult,
        match=r"outside the vocabulary|for 1 slots|not for the 1 slots",
    ):
        driver.core.take(StepResult(1, **arrays), 1)


@pytest.mark.parametrize("slots", [[63, 63], [63, 0], [62]])
def test_a_result_for_other_slots_than_the_plan_s_is_rejected(slots):
    driver = Driver(SHAPE)
    for prompt in (PROMPT, [7] * 9):
        driver.submit(prompt, max_tokens=9)
    plan = driver.core.plan(1)
    assert plan.sequences == 2
    with pytest.raises(BrokenResult, match="not for the 2 slots"):
        driver.core.take(StepResult(1, np.array(slots), np.full(len(slots), 5)), 1)


def test_a_resumed_sample_goes_on_where_it_was():
    driver = Driver(SHAPE)
    whole = driver.submit(PROMPT, n=3, max_tokens=30, stop=("zz",), sampling=SamplingSettings(Sampling(seed=5)))
    driver.run()
    tokens = driver.seen[whole + 2].tokens
    rest = driver.submit([*PROMPT, *tokens[:11]], max_tokens=30, resumed_tokens=11, first_sample_index=2,
                         sampling=SamplingSettings(Sampling(seed=5)))  # fmt: skip
    driver.run()
    assert driver.seen[rest].tokens == tokens[11:]
    finish = driver.seen[rest].finish
    assert (finish.prompt_tokens, finish.completion_tokens) == (len(PROMPT), 30)


def test_classes_are_served_in_order():
    shape = FakeShape(vocab_size=62, page_size=4, page_count=40, max_slots=1, max_tokens_per_step=64,
                      max_context_tokens=64, first_token=2)  # fmt: skip
    driver = Driver(shape)
    for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH):
        driver.submit([2, 3], max_tokens=2, priority=priority)
    driver.run()
    order = [plan.admitted_ids[0] for plan in driver.plans if plan.admitted_ids]
    assert order == ["r2", "r1", "r0"]


def test_a_finished_request_wastes_at_most_the_steps_ahead():
    driver = Driver(SHAPE, steps_ahead=5)
    token = driver_first_token()
    driver.submit(PROMPT, max_tokens=50, stop_token_ids=frozenset({token}))
    driver.run()
    while driver.answer():
        pass
    assert 0 < driver.core.state.queue.counters.wasted_tokens <= 4


def driver_first_token() -> int:
    driver = Driver(SHAPE)
    handle = driver.submit(PROMPT, max_tokens=10)
    return driver.expected(handle)[0][4]


def test_the_batch_is_sent_only_when_it_changes():
    driver = Driver(SHAPE)
    driver.submit(PROMPT, max_tokens=20)
    driver.run()
    assert [plan.batch is not None for plan in driver.plans] == [True, True] + [False] * 18


def test_a_full_queue_rejects_requests_with_a_retry_time():
    core = Scheduler([b"a"] * 62, 62, Policy(max_queued=3))
    driver = Driver(SHAPE)
    core.open_sink(SINK)
    core.attach(driver.core.state.pool.shape)
    driver.core = core
    driver.submit(PROMPT, n=3, max_tokens=4)
    with pytest.raises(Overloaded) as refused:
        driver.submit(PROMPT, max_tokens=4)
    assert refused.value.retry_after_s > 0


def test_more_samples_than_the_queue_can_ever_hold_are_rejected_without_a_retry_time():
    driver = Driver(SHAPE, max_queued=3)
    with pytest.raises(InvalidRequest, match="max_queued_sequences") as refused:
        driver.submit(PROMPT, n=4, max_tokens=4)
    assert refused.value.field == "n"


def test_the_retry_time_is_longer_for_more_samples():
    driver = Driver(SHAPE, max_queued=100)
    retry_after_s = Intake(driver.core.state, driver.core.deadlines).retry_after_s
    assert retry_after_s(1, 1.0) == 2.0  # nothing runs: there may be no worker
    driver.submit(PROMPT, n=4, max_tokens=30)
    for _ in range(3):
        driver.step()
    times = [retry_after_s(places, 1.0) for places in (1, 4, 5, 9)]
    assert times == sorted(times)
    assert times[3] > 2 * times[1]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_samples_of_a_prompt_each_compute_its_last_token_only(length):
    driver = Driver(SHAPE)
    driver.submit(PROMPT[:length], n=4, max_tokens=3)
    driver.run()
    assert driver.model.prefilled_tokens == length + 3


def test_a_closed_session_ends_all_its_samples_once():
    driver = Driver(SHAPE)
    driver.submit(PROMPT, n=50, max_tokens=30)
    driver.step()
    driver.step()
    driver.core.close_sink(SINK)
    state = driver.core.state
    assert (state.pool.slots.running, len(state.queue.waiting), state.pool.pages.in_use) == (0, 0, 0)
    assert state.queue.counters.sequences_cancelled == 50


def test_handles_and_ids_in_use_are_refused():
    driver = Driver(SHAPE)
    driver.submit(PROMPT, n=4, max_tokens=4)
    driver.next_handle = 3
    with pytest.raises(AlreadyExists, match="handle 3"):
        driver.submit(PROMPT, max_tokens=4)


def test_a_request_that_can_never_fit_is_rejected_with_the_flag_to_raise():
    driver = Driver(FakeShape(vocab_size=62, page_size=4, page_count=5, max_context_tokens=256))
    with pytest.raises(InvalidRequest, match="kv_cache_num_tokens") as refused:
        driver.submit(PROMPT, max_tokens=4)
    assert refused.value.reason == "KV_CACHE_TOO_SMALL"
    with pytest.raises(InvalidRequest, match="kv_cache_num_tokens"):
        driver.submit(PROMPT[:10], max_tokens=12)
    driver.submit(PROMPT[:10], max_tokens=11)
    driver.run()


def test_deadlines_end_requests_wherever_they_are():
    driver = Driver(FakeShape(**{**SHAPE.__dict__, "max_slots": 1}))
    driver.submit(PROMPT, max_tokens=50, deadline_ms=1000)
    driver.submit(PROMPT, max_tokens=50, deadline_ms=2000)
    driver.step()
    assert driver.core.deadlines.next_ms() == 1000
    driver.core.end_overdue(1500)
    driver.collect()
    assert [seen.finish and seen.finish.reason for seen in driver.seen.values()] == [FinishReason.DEADLINE, None]
    driver.core.end_overdue(2500)
    driver.collect()
    assert driver.seen[1].finish.reason is FinishReason.DEADLINE
    assert driver.core.state.pool.pages.in_use == 0


def test_a_sequence_the_worker_cannot_compute_ends_alone():
    driver = Driver(SHAPE)
    bad, good = driver.submit([61, *PROMPT], max_tokens=5), driver.submit(PROMPT, max_tokens=5)
    driver.model.fail_tokens = {61: "not a number"}
    driver.run()
    assert driver.seen[bad].finish.reason is FinishReason.ERROR
    assert "not a number" in driver.seen[bad].finish.error.message
    assert driver.seen[good].tokens == driver.expected(good)[0]
    assert driver.core.state.pool.tree.match(np.array([61, *PROMPT], np.uint32), "", 5, 10**9) == (ROOT, False)


def test_a_forecast_behind_a_long_queue_looks_at_a_bounded_number_of_steps(monkeypatch):
    looked = []
    first_fit = estimate.Placement.first_fit
    monkeypatch.setattr(
        estimate.Placement,
        "first_fit",
        lambda self, *parts: looked.append(len(self.pages)) or first_fit(self, *parts),
    )
    monkeypatch.setattr(estimate, "_MOST_CELLS", 5000)
    driver = Driver(SHAPE)
    handles = [driver.submit(PROMPT, max_tokens=200) for _ in range(300)]
    last = estimate.estimate(driver.core.state, driver.requests[handles[-1]])
    assert sum(looked) < 10_000
    assert last.finish > last.start > 0
