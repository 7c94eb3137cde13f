"""Random histories of arrivals, cancels, finishes and lost workers: nothing leaks, nothing is lost or doubled, every
sample says what it would have said alone."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.scheduler.core.memory.hydragen import HydragenPolicy
from services.scheduler.core.request import AdmissionMode, Finish, FinishReason, PauseMode, Priority
from tests.fakes.model import FakeShape
from tests.properties import examples
from tests.scheduler.core.driver import Driver

PREFIXES = [[2, 3, 4, 5] * 6, [2, 3, 4, 5] * 3 + [9] * 12, [7] * 30]


@st.composite
def shapes(draw):
    page_size = draw(st.sampled_from([1, 2, 4, 5, 8, 16]))
    slots = draw(st.integers(1, 6))
    return FakeShape(
        vocab_size=62,
        page_size=page_size,
        page_count=draw(st.integers(1, 60)),
        max_slots=slots,
        max_tokens_per_step=draw(st.integers(1, 24)),
        max_context_tokens=draw(st.integers(8, 64)),
        first_token=2,
        eos_token_id=0,
        eos_every=draw(st.sampled_from([0, 5, 30])),
        window_tokens=draw(st.sampled_from([0, 0, 1, 2, 3, 7, 16, 20])),
    )


@st.composite
def prompts(draw):
    prefix = draw(st.sampled_from(PREFIXES))
    return prefix[: draw(st.integers(0, len(prefix)))] + draw(st.lists(st.integers(2, 61), min_size=1, max_size=8))


@st.composite
def requests(draw):
    most = draw(st.none() | st.integers(1, 30))
    return {
        "tokens": draw(prompts()),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3, 7])),
        "max_tokens": most,
        "min_tokens": draw(st.sampled_from([0, 0, 3])) if most is None or most >= 3 else 0,
        "priority": draw(st.sampled_from(list(Priority))),
        "cache_salt": draw(st.sampled_from(["", "", "salt"])),
        "mode": draw(st.sampled_from([None, None, *AdmissionMode])),
        "length_class": draw(st.sampled_from(["", "", "short"])),
        "fairness_key": draw(st.sampled_from(["", "", "someone", "other"])),
        "stop": draw(st.sampled_from([(), (), ("abcab",), ("aa", "ab"), ("bcc", "cab", "bcc")])),
        "stop_token_ids": draw(st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 5, 6})])),
    }


moves = st.lists(
    st.one_of(
        requests(),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("ahead"), st.integers(2, 8)),
        st.tuples(st.just("pause"), st.sampled_from(PauseMode), st.booleans()),
        st.sampled_from(["plan", "plan", "light", "answer", "answer", "step", "step", "lose", "resume", "reset"]),
    ),
    max_size=60,
)
policies = st.fixed_dictionaries(
    {
        "steps_ahead": st.integers(2, 5),
        "prefix_caching": st.booleans(),
        "mode": st.sampled_from(list(AdmissionMode)),
        "margin": st.sampled_from([0.0, 1.0]),
        "ageing_s": st.sampled_from([0.0, 30.0, 1e-8]),
        "hydragen": st.sampled_from([None, HydragenPolicy(2, 2, row_cost=0, group_cost=0, call_cost=0)]),
        "micro_batches": st.sampled_from([1, 1, 3]),
    }
)


@pytest.mark.timeout(600)
@settings(max_examples=examples(1500, share=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(shapes(), moves, policies)
def test_every_history_ends_with_exactly_the_tokens_of_every_sample(shape, moves, policy):
    driver = Driver(shape, **policy)
    for move in moves:
        match move:
            case dict():
                with contextlib.suppress(InvalidRequest):  # too long for this context or pool
                    driver.submit(**move)
            case ("cancel", handle):
                driver.cancel(handle)
            case ("ahead", plans):
                driver.core.set_steps_ahead(plans)
            case ("pause", mode, recompute):
                driver.pause(mode, recompute=recompute)
            case "resume":
                driver.core.resume()
            case "reset":
                driver.core.reset_prefix_cache()
            case "plan":
                driver.plan()
            case "light":
                driver.plan(light=True)
            case "answer":
                driver.answer()
            case "step":
                driver.step()
            case "lose":
                driver.lose_worker()
    driver.core.resume()
    driver.run()
    for handle, seen in driver.seen.items():
        tokens, reason = driver.expected(handle)
        if seen.finish.reason in (FinishReason.CANCELLED, FinishReason.ABORTED) or _quarantined(seen.finish):
            assert seen.tokens == tokens[: len(seen.tokens)]
        else:
            assert (seen.tokens, seen.finish.reason) == (tokens, reason), seen.finish.error
        assert seen.finish.completion_tokens == len(seen.tokens)
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == 0
    assert driver.core.state.pool.slots.running == 0
    assert not driver.core.state.queue.requests
    assert driver.core.state.queue.counters.sequences_finished == len(driver.seen)


def _quarantined(finish: Finish) -> bool:
    """Return whether quarantine ended the sample, which repeated losses of workers may cause."""
    return finish.error is not None and finish.error.reason == "QUARANTINED"
