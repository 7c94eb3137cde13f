"""What only a model can show: penalties of its logits, and scores of prompts that are those of answers."""

import httpx
import pytest

from bench.server import serve
from services.common.text.tokenizer import Tokenizer
from tests.gateway.deployment import PATIENCE_S

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def real():
    with serve(device="cpu", dtype="float32", max_tokens_per_forward=64) as server:
        yield server


def margins(real, prompt, **penalties) -> list[float]:
    """How far token 300 is above token 400 in the logits of each step, where 300 is chosen each time."""
    bias = {"300": 100, "400": 60}
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logit_bias": bias, "logprobs": 2, "ignore_eos": True}
    body |= {"return_token_ids": True} | penalties
    response = httpx.post(f"{real.base_url}/v1/completions", json=body, timeout=PATIENCE_S)
    choice = response.raise_for_status().json()["choices"][0]
    assert choice["token_ids"] == [300] * 6
    return [max(top.values()) - min(top.values()) for top in choice["logprobs"]["top_logprobs"]]


def test_penalties_reach_the_logits(real):
    neither, first, second = [50, 51, 52], [50, 300, 52], [50, 400, 52]
    plain = margins(real, neither)
    presence = margins(real, neither, presence_penalty=1.5)
    assert presence == pytest.approx([plain[0], *(value - 1.5 for value in plain[1:])], abs=1e-3)
    frequency = margins(real, neither, frequency_penalty=-0.5)
    assert frequency == pytest.approx([value + 0.5 * step for step, value in enumerate(plain)], abs=1e-3)
    assert margins(real, first, presence_penalty=2)[0] == pytest.approx(margins(real, first)[0], abs=1e-3)
    repetition = margins(real, neither, repetition_penalty=1.1)
    assert repetition[0] == pytest.approx(plain[0], abs=1e-3)
    assert all(value < other - 5 for value, other in zip(repetition[1:], plain[1:], strict=True))
    assert margins(real, first, repetition_penalty=1.1)[0] < margins(real, first)[0] - 5
    assert margins(real, second, repetition_penalty=1.1)[0] > margins(real, second)[0] + 3


def test_penalties_work_for_chats_and_streams(real):
    tokenizer = Tokenizer.load("builtin")
    bias = {str(token): 100 for token in range(300, 306)}
    body = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "logit_bias": bias, "return_token_ids": True}
    body |= {"repetition_penalty": 50}
    url = f"{real.base_url}/v1/chat/completions"
    choice = httpx.post(url, json=body, timeout=PATIENCE_S).raise_for_status().json()["choices"][0]
    assert sorted(choice["token_ids"]) == list(range(300, 306))
    assert choice["message"]["content"] == tokenizer.vocabulary.text_bytes(choice["token_ids"]).decode()


def test_a_prompt_scores_as_it_would_be_generated(real):
    """Greedy tokens, told again as a prompt: the same log-probabilities, and each of them is the likeliest."""

    def ask(**body):
        response = httpx.post(f"{real.base_url}/v1/completions", json=body, timeout=PATIENCE_S)
        return response.raise_for_status().json()["choices"][0]

    prompt = [20 + 7 * number % 900 for number in range(150)]
    answer = ask(prompt=prompt, max_tokens=20, temperature=0, logprobs=2, return_token_ids=True, ignore_eos=True)
    whole = ask(prompt=prompt + answer["token_ids"], max_tokens=1, echo=True, logprobs=2, prompt_logprobs=1)
    told = whole["logprobs"]["token_logprobs"][150:170]
    assert told == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)
    for value, top in zip(told, whole["logprobs"]["top_logprobs"][150:170], strict=True):
        assert value == max(top.values())
    for token, entry in zip(answer["token_ids"], whole["prompt_logprobs"][150:170], strict=True):
        assert entry[str(token)]["rank"] == 1
