"""Which distribution log-probabilities are of: as the request says, else as the scheduler was started."""

import pytest

from services.common.config import SchedulerConfig
from services.common.flags import FlagError, load
from tests.fakes.model import MOST_DRAWABLE, PROCESSED_LESS, chosen_logprob
from tests.scheduler.service import PROMPT, start
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2 as o

TOKENS = g.TokenPrompt(token_ids=PROMPT)


@pytest.mark.parametrize("default", ["raw", "processed"])
async def test_a_request_names_its_mode_or_gets_the_schedulers(default):
    async with start(logprobs_mode=default) as service:
        model = (await service.stub.GetModel(o.GetModelRequest())).model
        modes = {"raw": g.LOGPROBS_MODE_RAW, "processed": g.LOGPROBS_MODE_PROCESSED}
        assert model.logprobs_mode == modes[default]
        for name, mode in (modes | {default: g.LOGPROBS_MODE_UNSPECIFIED}).items():
            output = g.Output(logprobs=True, top_logprobs=5, logprobs_mode=mode)
            sample = (await service.generate(tokens=TOKENS, output=output, stopping=g.Stopping(max_tokens=4)))[0]
            less, top = (PROCESSED_LESS, MOST_DRAWABLE) if name == "processed" else (0, 5)
            assert sample.chosen == pytest.approx((chosen_logprob(sample.tokens) - less).tolist())
            assert sample.top_counts == [top] * 4
            assert len(sample.top_ids) == 4 * top


@pytest.mark.parametrize("given", ["raw", "raw_logprobs", "processed", "processed_logprobs"])
def test_the_flag_takes_the_names_of_vllm(given):
    assert load(SchedulerConfig, [f"logprobs_mode={given}"], {}).logprobs_mode == given.removesuffix("_logprobs")


@pytest.mark.parametrize("given", ["raw_logits", "processed_logits", "both"])
def test_another_mode_is_refused_with_the_names_of_ours(given):
    with pytest.raises(FlagError, match="'raw' or 'processed'"):
        load(SchedulerConfig, [f"logprobs_mode={given}"], {})
