"""The client of prime-rl's rollouts against our servers. It needs ``pip install 'tokasaurus[ecosystem]'``."""

import asyncio

import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from services.common.model.files import BUILTIN

MESSAGES = [{"role": "user", "content": "Tom buys 3 books for $7 each. How much does he pay?"}]


@pytest.fixture(scope="module")
def renderers():
    return pytest.importorskip("renderers", reason="renderers is not installed")


@pytest.fixture(scope="module")
def generate(renderers, builtin_server):
    """Return a function that generates with the renderer of the model's chat template."""
    from renderers.client import generate

    renderer = renderers.create_renderer(AutoTokenizer.from_pretrained(BUILTIN), renderers.DefaultRendererConfig())

    async def call(**given):
        async with AsyncOpenAI(base_url=f"{builtin_server.base_url}/v1", api_key="none") as client:
            return await generate(
                client=client, renderer=renderer, messages=MESSAGES, model="tokasaurus-builtin", **given
            )

    return lambda **given: asyncio.run(call(**given))


def test_a_conversation_is_answered_with_tokens_and_their_log_probabilities(generate):
    answer = generate(sampling_params={"temperature": 0.0, "max_tokens": 40}, cache_salt="1", priority=0)
    assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) > 5
    assert all(value <= 0 for value in answer["completion_logprobs"])
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["content"]
    again = generate(prompt_ids=answer["prompt_ids"], sampling_params={"temperature": 0.0, "max_tokens": 40})
    assert again["completion_ids"] == answer["completion_ids"]


def test_a_prompt_that_is_too_long_is_found_before_the_call(renderers, generate):
    with pytest.raises(renderers.client.OverlongPromptError):
        generate(prompt_ids=[40] * 5000)
