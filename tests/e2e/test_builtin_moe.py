"""The built-in mixture of experts, served on a CPU."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from bench.server import serve
from services.common.model.files import BUILTIN_MOE
from training.corpus import held_out_generated
from training.problems import final_number
from training.tokenizer import completion_prompt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROBLEMS = held_out_generated(8)
COMPARED = 3  # of them with transformers, which takes longer
MOST_TOKENS = 250


def greedy_text(model, tokenizer, prompt: str) -> str:
    """Return the text that transformers generates with the likeliest tokens."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST_TOKENS)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_served_text_is_that_of_transformers_and_most_answers_are_right():
    prompts = [completion_prompt(problem.question) for problem in PROBLEMS]
    with serve(model="builtin-moe", device="cpu", dtype="float32") as server:
        assert server.model == "tokasaurus-builtin-moe"

        def ask(prompt: str) -> str:
            body = {"model": "builtin-moe", "prompt": prompt, "temperature": 0, "max_tokens": MOST_TOKENS}
            answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120, trust_env=False)
            return answer.raise_for_status().json()["choices"][0]["text"]

        with ThreadPoolExecutor(len(prompts)) as threads:  # together, so that a step has rows of several experts
            texts = list(threads.map(ask, prompts))
    model = transformers.AutoModelForCausalLM.from_pretrained(BUILTIN_MOE, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUILTIN_MOE)
    assert texts[:COMPARED] == [greedy_text(model, tokenizer, prompt) for prompt in prompts[:COMPARED]]
    right = [final_number(text) == problem.answer for text, problem in zip(texts, PROBLEMS, strict=True)]
    assert sum(right) >= 6


def test_the_returned_experts_are_those_that_transformers_chooses():
    prompts = [completion_prompt(problem.question) for problem in PROBLEMS[:2]]
    body = {"model": "builtin-moe", "prompt": prompts, "n": 3, "max_tokens": 40, "seed": 1}
    body |= {"return_routed_experts": True, "return_token_ids": True}
    with serve(model="builtin-moe", device="cpu", dtype="float32", return_routed_experts=True) as server:
        for _ in range(2):  # the second time, the prompts are cached
            answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120, trust_env=False)
            choices = answer.raise_for_status().json()["choices"]
    assert len(choices) == 6
    model = transformers.AutoModelForCausalLM.from_pretrained(BUILTIN_MOE, dtype=torch.float32).eval()
    for choice in choices:
        token_ids = choice["prompt_token_ids"] + choice["token_ids"][:-1]
        with torch.inference_mode():
            routers = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
        expected = torch.stack([each.topk(model.config.num_experts_per_tok).indices for each in routers], 1).numpy()
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert experts.shape == expected.shape
        assert (experts == expected).mean() > 0.999  # nearly equal scores may be in another order
