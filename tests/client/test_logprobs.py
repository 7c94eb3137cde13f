"""Parameters of log-probabilities and of thoughts in a script: as over HTTP."""

import pytest

from services.client import SamplingParams
from services.common.errors import InvalidRequest
from tests.client.test_llm import CHAT, deployment, llm
from tests.fakes.model import MOST_DRAWABLE, PROCESSED_LESS

__all__ = ["deployment", "llm"]


def test_prompt_logprobs_from_a_position(llm):
    [whole] = llm.generate(["Tom has 3"], SamplingParams(prompt_logprobs=1, max_tokens=1))
    [later] = llm.generate(["Tom has 3"], SamplingParams(prompt_logprobs=1, prompt_logprobs_start=2, max_tokens=1))
    assert later.prompt_logprobs == whole.prompt_logprobs[2:]


def test_the_mode_of_log_probabilities(llm):
    raw, processed = (
        llm.generate(["Tom has 3"], SamplingParams(logprobs=5, seed=1, max_tokens=3, logprobs_mode=mode))[0].outputs[0]
        for mode in ("raw", "processed")
    )
    assert raw.token_ids == processed.token_ids
    for mine, other in zip(raw.logprobs, processed.logprobs, strict=True):
        assert other.logprob == pytest.approx(mine.logprob - PROCESSED_LESS)
        assert (len(mine.top_ids), len(other.top_ids)) == (5, MOST_DRAWABLE)
    with pytest.raises(InvalidRequest, match="'raw' or 'processed'"):
        SamplingParams(logprobs_mode="raw_logits")


@pytest.mark.parametrize("ask", [lambda llm, one: llm.generate(["x"], one), lambda llm, one: llm.chat([CHAT], one)])
def test_a_model_without_thoughts_refuses_a_budget_for_them(llm, ask):
    [output] = ask(llm, SamplingParams(thinking_token_budget=1))
    assert isinstance(output.error, InvalidRequest)
    assert output.error.field == "thinking_token_budget"
    assert "has no reasoning section" in output.error.message
