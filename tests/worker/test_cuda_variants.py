"""Every configuration of a native family on a GPU, against transformers in float32 on the CPU.

Differences of float32 come from the order of sums. In bfloat16, transformers' own error on the same tokens is the
measure: it depends on the configuration, above all on how often rounding changes the choice of an expert.
"""

import gc
import math
from pathlib import Path

import pytest
import torch
import transformers

from services.common.config import WorkerConfig
from services.common.model.json_object import read_json
from services.worker.boot.common import boot
from services.worker.described.registry import read_model_config
from tests.e2e.samples import Agreement, Sample, agreement, random_prompt
from tests.variants import FAMILIES, Variant, make_variant
from tests.worker.driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

Answers = list[tuple[list[int], Sample]]  # prompt, answer
TOKENS = 24
LENGTHS = ((1, 17, 200), range(1, 240, 20))  # a decode graph, and steps that are none
FLAGS = {
    "device": "cuda",
    "use_cudagraphs": True,
    "cudagraph_max_size": 8,
    "piecewise_cudagraph_max_tokens": 128,
    "max_tokens_per_forward": 256,
    "max_seqs_per_forward": 64,
    "kv_cache_num_tokens": 16 * 1024,
}


def answers_of(directory: Path, vocab_size: int, dtype: str) -> Answers:
    """Return prompts and greedy answers. Chunks of long prompts run beside rows that decode."""
    driver = Driver(boot(WorkerConfig(model=str(directory), dtype=dtype, **FLAGS)).runner)
    answers = []
    for lengths in LENGTHS:
        driver.reset()
        prompts = [random_prompt(length, vocab_size) for length in lengths]
        driver.generate(prompts, TOKENS, chunk=96, logprobs=True)
        answers += [(prompt, Sample(driver.tokens[slot], driver.logprobs[slot])) for slot, prompt in enumerate(prompts)]
    driver.runner.close()
    del driver
    gc.collect()
    torch.cuda.empty_cache()
    return answers


def error_of_transformers(directory: Path, reference: torch.nn.Module, answers: Answers) -> Agreement:
    """Return how transformers in bfloat16 agrees with ``reference`` on the tokens of ``answers``."""
    rounded = load(directory, torch.bfloat16)
    theirs = []
    with torch.inference_mode():
        for prompt, sample in answers:
            logits = rounded(torch.tensor([prompt + sample.tokens])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.float().log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
            theirs.append((prompt, Sample(sample.tokens, chosen.tolist())))
    return agreement(reference, theirs)


def load(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.AutoConfig.from_pretrained(directory)
    settings, length = config.rope_parameters, config.max_position_embeddings
    if settings.get("rope_type") == "longrope" and length > settings["original_max_position_embeddings"]:
        settings["short_factor"] = settings["long_factor"]  # as in situations.Expected
    return transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, **plain).eval()


@pytest.mark.parametrize("variant", [Variant(family, 0) for family in FAMILIES], ids=str)
def test_float32_agrees_with_transformers(variant, tmp_path):
    directory = make_variant(tmp_path, variant)
    reference = load(directory, torch.float32)
    agreement(reference, answers_of(directory, reference.config.vocab_size, "float32")).check(2e-4, 1e-5, 0.99)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant(family, number) for family in FAMILIES for number in range(10)], ids=str)
def test_bfloat16_is_as_near_as_transformers(variant, tmp_path, record_property):
    directory = make_variant(tmp_path, variant)
    reference = load(directory, torch.float32)
    answers = answers_of(directory, reference.config.vocab_size, "bfloat16")
    ours, theirs = agreement(reference, answers), error_of_transformers(directory, reference, answers)
    record_property("mean", f"{ours.mean:.4f} {theirs.mean:.4f}")
    # One other choice of an expert changes the rest of a sequence, so the largest difference is a matter of luck.
    experts = read_model_config(read_json(directory / "config.json")).experts
    ours.check(math.inf if experts else 3 * theirs.largest + 0.02, 1.5 * theirs.mean + 0.002)
