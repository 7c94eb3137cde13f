"""What a plan carries fits into a message, whatever is asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.plan.codec import encode_plan
from services.common.plan.types import SamplingSettings
from services.scheduler.core.request import FinishReason
from services.scheduler.core.step import prefill
from tests.fakes.model import FakeShape
from tests.properties import examples
from tests.scheduler.core.driver import Driver
from tokasaurus.common.v1.sampling_pb2 import Sampling

PROMPT = [16 + index % 50 for index in range(43)]


def biased(entries: int, first: int = 0) -> SamplingSettings:
    return SamplingSettings(
        Sampling(seed=7, logit_bias_token_ids=range(first, first + entries), logit_bias_values=[1] * entries)
    )


def test_the_admissions_of_a_plan_fit_into_a_message(monkeypatch):
    monkeypatch.setattr(prefill, "_MOST_BYTES", 5 * (4 * len(PROMPT) + 256))
    driver = Driver(FakeShape())
    handle = driver.submit(PROMPT, n=17, max_tokens=3)
    driver.run()
    carried = [len(plan.admissions) for plan in driver.plans]
    assert max(carried) == 5
    assert sum(carried) == 17
    for index in range(handle, handle + 17):
        assert driver.seen[index].tokens == driver.expected(index)[0]


@pytest.mark.parametrize(
    ("sampling", "each"),
    [
        (SamplingSettings(Sampling(seed=7), grammar="start: /a*/ // " + "x" * 500), 4 * 515),
        (biased(500), 8 * 500),
    ],
)
def test_a_plan_has_no_more_settings_than_a_message_holds(monkeypatch, sampling, each):
    """Each admission has its own copy."""
    monkeypatch.setattr(prefill, "_MOST_BYTES", 4 * each)
    driver = Driver(FakeShape())  # its grammars are of the built-in model's tokens
    driver.submit([5, 6], n=5, max_tokens=4, sampling=sampling)
    driver.run()
    carried = [len(plan.admissions) for plan in driver.plans]
    assert (max(carried), sum(carried)) == (3, 5)


WEIGHTS = st.tuples(st.integers(1, 60), st.integers(0, 700), st.integers(0, 300), st.integers(1, 6))


@settings(max_examples=examples(40), deadline=None)
@given(asked=st.lists(WEIGHTS, min_size=1, max_size=8))
def test_no_plan_is_larger_than_what_was_counted(asked):
    """Prompts, biases and grammars of any size, and their siblings."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(prefill, "_MOST_BYTES", 8000)
        driver = Driver(FakeShape())
        for number, (prompt, bias, comment, n) in enumerate(asked):
            sampling = biased(bias, number)._replace(grammar=f"start: /a*/ // {'漢' * comment}" if comment else "")
            tokens = [5 + number, *range(16, 15 + prompt)]
            driver.submit(tokens, n=n, max_tokens=3, sampling=sampling)
        driver.run()
    for plan in driver.plans:
        sizes = [admission.ByteSize() - 4 * len(admission.pages) for admission in encode_plan(plan).admissions]
        assert len(sizes) <= 1 or sum(sizes) <= 8000


def test_a_sequence_that_no_plan_can_carry_ends_alone(monkeypatch):
    monkeypatch.setattr(prefill, "_MOST_BYTES_ALONE", 3000)
    driver = Driver(FakeShape())
    heavy = driver.submit([5, 6], n=3, max_tokens=4, sampling=biased(400))
    light = driver.submit([5, 7], n=3, max_tokens=4, sampling=biased(300))
    driver.run()
    reasons = [driver.seen[handle].finish.reason for handle in range(heavy, light + 3)]
    assert reasons == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH] * 3
    [(request_id, error)] = driver.core.take_failures()
    assert (request_id, "of a plan" in str(error)) == (f"r{heavy}", True)
