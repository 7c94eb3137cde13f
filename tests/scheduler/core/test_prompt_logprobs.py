"""Log-probabilities of prompts: output once, in order, whatever is cached, shared or interrupted."""

from dataclasses import replace

import numpy as np
import pytest

from services.common.plan.result import ScoredTokens, StepResult
from services.common.plan.result_rules import BrokenResult
from services.common.plan.top_logprobs import TopLogprobs
from services.common.plan.types import SamplingSettings
from services.scheduler.core.request import AdmissionMode
from tests.fakes.model import FakeShape, chosen_logprob, top_token_ids
from tests.scheduler.core.driver import SINK, Driver
from tokasaurus.common.v1.sampling_pb2 import Sampling

SHAPE = FakeShape(
    vocab_size=62, page_size=4, page_count=60, max_slots=8, max_tokens_per_step=16, max_context_tokens=100,
    first_token=2, eos_token_id=-1,
)  # fmt: skip
PROMPT = [2 + number * 7 % 60 for number in range(43)]
ASKED = SamplingSettings(Sampling(seed=7), prompt_logprobs=2)


class Scores(Driver):
    """Keeps the output log-probabilities of prompts, by handle."""

    outputs: dict[int, list[ScoredTokens]]

    def _note(self, delta):
        self.outputs = getattr(self, "outputs", {})
        for handle, scored in delta.scored:
            assert not self.seen[handle].tokens, "a prompt's scores behind its tokens"
            self.outputs.setdefault(handle, []).append(scored)
        super()._note(delta)

    def check(self, handle: int, prompt: list[int], top: int = 2, first: int = 1) -> None:
        """All of ``prompt`` from position ``first`` was output once, in order."""
        parts, place = self.outputs[handle], first
        for part in parts:
            assert part.start == place
            place += len(part.logprobs)
            tokens = prompt[part.start : place]
            assert part.logprobs.tolist() == chosen_logprob(tokens).tolist()
            assert part.ranks.tolist() == [token % 7 + 1 for token in tokens]
            tops = [top_token_ids(token, top, SHAPE.vocab_size) for token in tokens]
            assert part.top.token_ids.tolist() == np.concatenate(tops).tolist()
            assert part.top.logprobs.tolist() == chosen_logprob(np.concatenate(tops)).tolist()
        assert place == len(prompt)


@pytest.mark.parametrize("n", [1, 5])
def test_scores_are_output_in_chunks_with_the_first_sample(n):
    driver = Scores(SHAPE)
    handle = driver.submit(PROMPT, n=n, sampling=ASKED, max_tokens=6)
    driver.run()
    assert list(driver.outputs) == [handle]
    assert len(driver.outputs[handle]) >= 3
    driver.check(handle, PROMPT)
    for sample in range(handle, handle + n):
        assert driver.seen[sample].tokens == driver.expected(sample)[0]


@pytest.mark.parametrize("n", [1, 3])
def test_cached_tokens_are_computed_again_for_scores_and_stay_cached(n):
    driver = Scores(SHAPE)
    for sampling in (SamplingSettings(Sampling(seed=7)), ASKED, SamplingSettings(Sampling(seed=7))):
        handle = driver.submit(PROMPT, n=n, sampling=sampling, max_tokens=3)
        driver.run()
        cached = driver.seen[handle].finish.cached_prompt_tokens
        if sampling is ASKED:
            driver.check(handle, PROMPT)
            assert cached == 0
    assert cached == 40


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (21, 20), (22, 20), (42, 40)])
def test_pages_before_the_start_are_not_computed_again(start, cached, n):
    """The token at ``start`` is scored from the one before it, which is computed. Siblings may compute more."""
    driver = Scores(SHAPE)
    driver.submit(PROMPT, max_tokens=3)
    driver.run()
    before = driver.model.prefilled_tokens
    handle = driver.submit(PROMPT, n=n, sampling=ASKED._replace(prompt_logprobs_start=start), max_tokens=3)
    driver.run()
    driver.check(handle, PROMPT, first=max(1, start))
    if n == 1:
        assert driver.model.prefilled_tokens - before == len(PROMPT) - cached
    assert driver.seen[handle].finish.cached_prompt_tokens == cached
    for sample in range(handle, handle + n):
        assert driver.seen[sample].tokens == driver.expected(sample)[0]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("tokens_per_step", [16, 64])
def test_the_samples_of_a_request_score_their_prompt_once(tokens_per_step, cached):
    """Another request's pages may hold the prompt. Then a sample may score the prompt's last page again."""
    driver = Scores(replace(SHAPE, max_tokens_per_step=tokens_per_step))
    if cached:
        driver.submit(PROMPT, max_tokens=3)
        driver.run()
    handle = driver.submit(PROMPT, n=5, sampling=ASKED, max_tokens=6)
    driver.run()
    driver.check(handle, PROMPT)
    again = SHAPE.page_size if cached else 0
    assert len(PROMPT) - 1 <= driver.model.scored_tokens <= len(PROMPT) - 1 + again
    for sample in range(handle, handle + 5):
        assert driver.seen[sample].tokens == driver.expected(sample)[0]


@pytest.mark.parametrize("steps", range(5))
def test_a_lost_worker_loses_no_scores_after_the_start(steps):
    driver = Scores(SHAPE)
    handle = driver.submit(PROMPT, sampling=ASKED._replace(prompt_logprobs_start=14), max_tokens=8)
    for _ in range(steps):
        driver.step()
    driver.lose_worker()
    driver.run()
    driver.check(handle, PROMPT, first=14)


def test_scores_before_the_start_of_a_worker_that_does_not_know_it_are_not_sent():
    driver = Scores(SHAPE)
    handle = driver.submit(PROMPT, sampling=ASKED._replace(prompt_logprobs_start=9), max_tokens=3)
    plan = driver.core.plan(driver.tick())
    [sampled] = plan.admissions
    count = SHAPE.max_tokens_per_step
    ids = np.concatenate([top_token_ids(token, 2, SHAPE.vocab_size) for token in PROMPT[1 : count + 1]])
    top = TopLogprobs(np.full(count, 2), ids, chosen_logprob(ids))
    scored = ScoredTokens(0, 1, chosen_logprob(PROMPT[1 : count + 1]), np.ones(count, np.uint32), top)
    result = StepResult(1, np.zeros(0, np.int64), np.zeros(0, np.int64), scored=(scored,))
    driver.core.take(result, driver.tick())
    assert driver.requests[handle].scored == count
    assert sampled.sampling.prompt_logprobs_start == 9


def test_two_requests_with_one_prefix_both_get_scores():
    driver = Scores(SHAPE)
    handles = [driver.submit([*PROMPT, more], sampling=ASKED, max_tokens=3) for more in (5, 6, 5)]
    plain = driver.submit([*PROMPT, 9], max_tokens=3)
    driver.run()
    for handle, more in zip(handles, (5, 6, 5), strict=True):
        driver.check(handle, [*PROMPT, more])
    assert plain not in driver.outputs
    for handle in (*handles, plain):
        assert driver.seen[handle].tokens == driver.expected(handle)[0]


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("n", [1, 3])
def test_a_lost_worker_loses_and_repeats_no_scores(steps, n):
    driver = Scores(SHAPE)
    handle = driver.submit(PROMPT, n=n, sampling=ASKED, max_tokens=8)
    for _ in range(steps):
        driver.step()
    driver.lose_worker()
    driver.run()
    driver.check(handle, PROMPT)
    for sample in range(handle, handle + n):
        assert driver.seen[sample].tokens == driver.expected(sample)[0]


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("cached", [False, True])
def test_scores_are_complete_if_the_sample_that_computes_them_is_cancelled(cached, steps):
    driver = Scores(SHAPE)
    if cached:
        driver.submit([*PROMPT, 5], max_tokens=3)
        driver.run()
    handle = driver.submit(PROMPT, n=3, sampling=ASKED, max_tokens=8)
    for _ in range(steps):
        driver.step()
    driver.cancel(handle)
    driver.run()
    driver.check(handle, PROMPT)
    for sample in (handle + 1, handle + 2):
        assert driver.seen[sample].tokens == driver.expected(sample)[0]


def test_requests_for_prompt_logprobs_are_never_preempted():
    driver = Scores(SHAPE, mode=AdmissionMode.PREDICTED)
    assert driver.core.state.queue.requests == {}
    handle = driver.submit(PROMPT, sampling=ASKED, max_tokens=20)
    other = driver.submit(PROMPT[1:], max_tokens=20)
    assert driver.requests[handle].guaranteed
    assert not driver.requests[other].guaranteed
    driver.run()
    driver.check(handle, PROMPT)


def test_a_resumed_sequence_outputs_only_scores_of_its_prompt():
    driver = Scores(SHAPE)
    handle = driver.submit(PROMPT, sampling=ASKED, max_tokens=20, resumed_tokens=10)
    driver.run()
    driver.check(handle, PROMPT[:33])


def test_a_prompt_of_one_token_has_no_scores():
    driver = Scores(SHAPE)
    handle = driver.submit([5], n=2, sampling=ASKED, max_tokens=3)
    driver.run()
    assert driver.outputs == {}
    assert driver.seen[handle].finish is not None


def test_scores_that_do_not_fit_each_other_are_refused():
    driver = Scores(SHAPE)
    driver.submit(PROMPT, sampling=ASKED, max_tokens=3)
    driver.core.plan(driver.tick())
    one, two = np.zeros(1, np.float32), np.zeros(2, np.uint32)
    for scored in (
        ScoredTokens(0, 1, one, two, TopLogprobs(np.full(1, 2), two, two)),
        ScoredTokens(0, 0, one, two[:1], TopLogprobs(np.full(1, 2), two, two)),
        ScoredTokens(0, 1, one, two[:1], TopLogprobs(np.full(1, 2), two, one)),
        ScoredTokens(0, 1, one, two[:1], TopLogprobs.none(2)),
        ScoredTokens(0, 1, one[:0], two[:0], TopLogprobs.none(0)),
    ):
        result = StepResult(1, np.zeros(0, np.int64), np.zeros(0, np.int64), scored=(scored,))
        with pytest.raises(BrokenResult, match="scores of"):
            driver.core.take(result, driver.tick())
    assert driver.core.live(SINK) == 1
