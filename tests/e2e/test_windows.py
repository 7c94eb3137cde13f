"""A deployment with a model that has a window in every layer: more sequences run than its cache would hold whole."""

import asyncio

import openai
import pytest

from bench.server import serve
from services.scheduler.record.check import check_file
from services.scheduler.record.reader import Recording, find_recordings
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

REQUESTS, TOKENS = 12, 260


async def answers(base_url: str, model: str) -> list[list[str]]:
    """Greedy answers to prompts of different lengths, all at once."""
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        settings = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "extra_body": {"ignore_eos": True}}
        prompts = [list(range(2, 40 + 15 * number)) for number in range(REQUESTS)]
        calls = (client.completions.create(model=model, prompt=prompt, **settings) for prompt in prompts)
        return [found.choices[0].logprobs.tokens for found in await asyncio.gather(*calls)]


@pytest.mark.parametrize("sizes", [{}, {"pp_size": 2}, {"tp_size": 2}], ids=["alone", "pp", "tp"])
def test_pages_that_the_window_left_behind_serve_other_sequences(tmp_path, sizes):
    directory = make_checkpoint(tmp_path / "model", "mistral", sliding_window=40)
    found = []
    for tokens in (16 * 600, 16 * 40):
        plans = tmp_path / f"plans-{tokens}"
        flags = {"kv_cache_num_tokens": tokens, "admission": "guaranteed", "record_plans": plans}
        with serve(model=directory, device="cpu", max_tokens_per_forward=128, **flags, **sizes) as server:
            found.append(asyncio.run(answers(server.base_url, server.model)))
        checked = [check_file(path) for path in find_recordings(str(plans))]
        assert all(each.good and each.plans for each in checked)
        info = Recording(find_recordings(str(plans))[0]).info
        assert (info.window_tokens, info.hydragen) == (40, False)
    assert all(len(answer) == TOKENS for answer in found[0])
    # Batches of other sizes round differently, which decides ties. Pages of other sequences would change all answers.
    assert sum(one == other for one, other in zip(*found, strict=True)) >= REQUESTS - 2
