"""SmolLM2-135M-Instruct from its GGUF file, held against transformers on the same file."""

import pytest
import torch

from services.common.text.tokenizer import Tokenizer
from services.worker.models.gguf_shard import open_shard
from tests import real_model
from tests.real_model import needs_real_model

pytestmark = [needs_real_model, pytest.mark.slow]
TOKENS = 24
QUESTIONS = ("What is the capital of France?", "Write a haiku about the sea.", "def fibonacci(n):", "7 + 5 = ?")


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(str(real_model.PATH))
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def test_greedy_tokens_and_their_logprobs_are_those_of_transformers(runner_for):
    driver = runner_for(real_model.PATH, dtype="float32")
    answers = driver.generate(prompts(), TOKENS, chunk=20, logprobs=True)
    for slot, (prompt, tokens) in enumerate(zip(prompts(), answers, strict=True)):
        with torch.inference_mode():
            logits = real_model.reference_model()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(driver.logprobs[slot]), expected, rtol=0, atol=1e-3)


def test_weights_are_those_of_transformers():
    expected = real_model.reference_model().state_dict()
    with open_shard(real_model.PATH) as shard:
        for name in shard.keys():  # noqa: SIM118 (not a mapping)
            assert torch.equal(shard.get_tensor(name), expected[name])
