"""Something goes wrong with one request, wherever it is: that one ends with an error, and nothing else happens."""

import random
from collections.abc import Callable
from itertools import product

import pytest

from services.common.errors import Internal, TokaError
from services.common.plan.types import SamplingSettings
from services.scheduler.core.life import lifecycle
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.memory.prefix_tree import PrefixTree
from services.scheduler.core.queue.deadlines import Deadlines
from services.scheduler.core.queue.lengths import LengthPredictor
from services.scheduler.core.queue.waiting import WaitingQueue
from services.scheduler.core.request import AdmissionMode, FinishReason
from services.scheduler.core.step.prefill import Prefill
from services.scheduler.core.step.results import Results
from services.scheduler.core.stopping.matcher import StopMatcher
from services.scheduler.core.stopping.tokens import StopTokens
from tests.fakes.model import FakeShape
from tests.quick import quick_if
from tests.scheduler.core.driver import SINK, Driver
from tokasaurus.common.v1.sampling_pb2 import Sampling

SHAPE = FakeShape(
    vocab_size=62, page_size=4, page_count=120, max_slots=24, max_tokens_per_step=48, max_context_tokens=128,
    first_token=2,
)  # fmt: skip
SET = frozenset({60, 61})  # of the bad request alone


@pytest.fixture
def break_at(monkeypatch):
    """``break_at(owner, name, concerns)``: from here on the function raises where ``concerns(*arguments)``."""

    def install(owner, name: str, concerns: Callable[..., bool]) -> list:
        original, raised = getattr(owner, name), []

        def breaking(*args, **kwargs):
            if concerns(*args, **kwargs):
                raised.append(args)
                raise RuntimeError("injected")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, breaking)
        return raised

    return install


def _is_bad(request) -> bool:
    return request.cache_salt == "bad"


def _is_ours(error: TokaError | None) -> bool:
    return error is not None and error.message == Internal.logged().message


def _is_of_bad(automaton) -> bool:
    return list(automaton.patterns) == [b"bca", b"aba"]


# Where, and whether it is about the bad request.
POINTS = {
    "looked up": (Prefill, "_entry", lambda self, plan, sample, claimed: _is_bad(sample.request)),
    "matched": (PrefixTree, "match", lambda self, tokens, salt, *_: salt == "bad"),
    "its pages found": (PrefixTree, "extend", lambda self, node, tokens, salt, *_: salt == "bad"),
    "entered": (Lifecycle, "_stop_state", lambda self, sample: _is_bad(sample.request)),
    "its stop tokens": (StopTokens, "acquire", lambda self, tokens, users: tokens == SET),
    "stopped": (StopMatcher, "first_match", lambda self, automaton, *_: _is_of_bad(automaton)),
    "not stopped yet": (StopMatcher, "pass_over", lambda self, automaton, *_: _is_of_bad(automaton)),
    "scored": (Results, "_output_scores", lambda self, request, scored: _is_bad(request)),
    "let go of": (StopMatcher, "release", lambda self, automaton: _is_of_bad(automaton)),
    "interrupted": (Lifecycle, "_copy_tokens", lambda self, sample: _is_bad(sample.request)),
    "ended": (lifecycle, "finish_of", lambda ending, version: _is_bad(ending.sample.request) and ending.error is None),
}


@pytest.mark.parametrize(
    ("n", "mode"),
    quick_if(lambda n, mode: (n == 5) == (mode is AdmissionMode.PREDICTED), product([1, 5], AdmissionMode)),
)
@pytest.mark.parametrize("point", POINTS)
def test_an_error_in_one_request_ends_only_that_request(point, n, mode, break_at):
    raised = break_at(*POINTS[point])
    driver = Driver(SHAPE, mode=mode)
    others = _submit_others(driver, 4)
    bad = driver.submit(
        [7] * 22, n=n, min_tokens=15, max_tokens=60, stop=("bca", "aba"), stop_token_ids=SET, cache_salt="bad",
        sampling=SamplingSettings(Sampling(seed=5), prompt_logprobs=0 if point == "scored" else None),
    )  # fmt: skip
    others += _submit_others(driver, 36)
    for _ in range(5):
        driver.step()
    driver.lose_worker()
    driver.run()
    assert raised
    _check_others(driver, others)
    ends = [driver.seen[handle].finish for handle in range(bad, bad + n)]
    assert any(_is_ours(finish.error) for finish in ends)
    for finish, handle in zip(ends, range(bad, bad + n), strict=True):
        tokens, _ = driver.expected(handle)
        assert driver.seen[handle].tokens == tokens[: len(driver.seen[handle].tokens)]
        assert _is_ours(finish.error) or finish.reason is FinishReason.STOP
    assert {request_id for request_id, _ in driver.core.take_failures()} == {f"r{bad}"}
    assert driver.core.take_failures() == []


@pytest.mark.parametrize(
    ("owner", "name", "concerns"),
    [
        (LengthPredictor, "class_of", lambda self, label, answer: label == "bad"),
        (WaitingQueue, "push", lambda self, sample: _is_bad(sample.request) and sample.index == 2),
        (Deadlines, "add", lambda self, request: _is_bad(request)),
        (StopMatcher, "acquire", lambda self, automaton: _is_of_bad(automaton)),
    ],
)
def test_a_request_that_cannot_be_queued_leaves_no_trace(owner, name, concerns, break_at):
    raised = break_at(owner, name, concerns)
    driver = Driver(SHAPE)
    others = _submit_others(driver, 10)
    driver.step()
    before = len(driver.core.state.queue.waiting), driver.core.state.queue.waiting.tokens, driver.core.live(SINK)
    with pytest.raises(RuntimeError, match="injected"):
        driver.submit(
            [7] * 9, n=4, max_tokens=4, stop=("bca", "aba"), cache_salt="bad", length_class="bad", deadline_ms=10**15
        )
    assert raised
    assert (
        len(driver.core.state.queue.waiting),
        driver.core.state.queue.waiting.tokens,
        driver.core.live(SINK),
    ) == before
    assert f"r{driver.next_handle}" not in driver.core.state.queue.requests
    assert not driver.core.state.queue.matcher.in_use
    driver.collect()
    again = driver.submit([7] * 9, n=4, max_tokens=4)  # the handles are free
    driver.run()
    _check_others(driver, [*others, *range(again, again + 4)])
    assert driver.core.state.queue.counters.requests_accepted == len(driver.requests)


def test_output_that_cannot_be_delivered_ends_only_its_request():
    driver = Driver(SHAPE)
    others = _submit_others(driver, 10)
    bad = driver.submit([7] * 9, n=3, max_tokens=40)
    driver.step()
    driver.core.fail(SINK, bad + 1, RuntimeError("injected"))
    driver.core.fail(SINK, 10_000, RuntimeError("of somebody who is not there"))
    driver.run()
    _check_others(driver, others)
    assert all(_is_ours(driver.seen[handle].finish.error) for handle in range(bad, bad + 3))


def test_an_error_while_a_thousand_samples_end_is_reported_once(break_at):
    raised = break_at(lifecycle, "finish_of", lambda ending, version: _is_bad(ending.sample.request))
    driver = Driver(SHAPE)
    bad = driver.submit([7] * 9, n=1000, max_tokens=4, cache_salt="bad")
    driver.run()
    assert len(raised) == 1000
    assert all(_is_ours(driver.seen[handle].finish.error) for handle in range(bad, bad + 1000))
    assert [request_id for request_id, _ in driver.core.take_failures()] == [f"r{bad}"]


def test_an_error_while_requests_are_cancelled_without_a_worker_is_not_kept(break_at):
    break_at(lifecycle, "finish_of", lambda ending, version: _is_bad(ending.sample.request))
    driver = Driver(SHAPE)
    bad = driver.submit([7] * 9, n=3, max_tokens=4, cache_salt="bad")
    driver.core.detach()
    driver.core.cancel(SINK, [bad])
    assert not driver.core.state.queue.broken
    assert not driver.core.state.queue.requests
    driver.collect()
    assert [request_id for request_id, _ in driver.core.take_failures()] == [f"r{bad}"]


def _submit_others(driver: Driver, count: int) -> list[int]:
    chance, handles = random.Random(driver.next_handle), []
    for _ in range(count):
        tokens = [chance.randint(2, 61) for _ in range(chance.randint(1, 30))]
        handles.append(driver.submit(tokens, max_tokens=chance.randint(1, 40)))
    return handles


def _check_others(driver: Driver, handles: list[int]) -> None:
    """Their texts are right, and nothing is left of anybody. (``Driver`` checks the book-keeping after every move.)"""
    for handle in handles:
        seen = driver.seen[handle]
        assert (seen.tokens, seen.finish.reason) == driver.expected(handle)
    while driver.answer():
        pass
    state = driver.core.state
    assert state.pool.pages.in_use == state.pool.slots.running == len(state.queue.waiting) == 0
    assert not state.queue.requests
    assert not state.queue.broken
