"""Log-probabilities of prompts on a GPU: those of transformers on a CPU, and in memory that the boot has proved."""

import json

import numpy as np
import pytest
import torch

from services.common.model import files as model_files
from services.worker.boot.compilation import kernel_compilations, recompilations
from services.worker.step.output import StepOutput
from tests.worker.driver import Driver, admission, batch
from tests.worker.scores import check_scores
from tests.worker.test_cuda_runner import driver_for, texts

__all__ = ["driver_for", "texts"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

# By slot: tokens of the prompt, of its chunks, and how many of the most likely tokens were asked for.
LENGTHS, CHUNKS, TOP = {1: 1400, 2: 100, 3: 17, 4: 330}, {1: 400, 2: 60, 3: 17, 4: 1}, {1: 5, 2: 0, 3: 20, 4: 1}
PAGE = 16
# For bfloat16 as measured on a CPU, and room.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


def score(driver: Driver, prompts: dict[int, list[int]]) -> list[StepOutput]:
    """All prompts beside two rows that decode; slot 4 has all but its last tokens cached, and computes one a step."""
    pages = {slot: range(100 * slot, 100 * slot + -(-len(prompt) // PAGE)) for slot, prompt in prompts.items()}
    plain = {slot: admission(slot, [5, 6, 7], [slot], temperature=0.7) for slot in (0, 5)}
    cached = admission(6, prompts[4][: LENGTHS[4] - 10], pages[4])
    outputs = [driver.run(admissions=(*plain.values(), cached), batch=batch([0, 5, 6], [3, 3, LENGTHS[4] - 10]))]
    left = {slot: len(prompt) for slot, prompt in prompts.items()}
    left[4] = 10
    admissions = tuple(
        admission(
            slot, prompt, pages[slot], cached_tokens=len(prompt) - left[slot], prompt_logprobs=TOP[slot], top_p=0.5
        )
        for slot, prompt in prompts.items()
    )
    while any(left.values()):
        counts = {slot: min(CHUNKS[slot], tokens) for slot, tokens in left.items() if tokens}
        rows = batch([5, *counts, 0], [1, *counts.values(), 1])
        outputs.append(driver.run(releases=[6] if admissions else [], admissions=admissions, batch=rows))
        left = {slot: tokens - counts.get(slot, 0) for slot, tokens in left.items()}
        admissions = ()
    return outputs


@pytest.mark.parametrize("slice_rows", [48, 8192])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_scores_are_those_of_transformers(driver_for, texts, reference, monkeypatch, dtype, compiled, slice_rows):
    """A prompt of several chunks, several prompts in a step, and rows of one token, beside rows that decode; nothing is
    compiled meanwhile."""
    from services.worker.sampling import fused

    expected = reference(model_files.BUILTIN)
    monkeypatch.setattr(fused, "_SCORED_ELEMENTS", slice_rows * expected.config.vocab_size)
    text = [token for _, tokens in texts for token in tokens]
    prompts = {slot: text[slot : slot + length] for slot, length in LENGTHS.items()}
    flags = {"torch_compile": compiled, "use_cudagraphs": True, "cudagraph_max_size": 8, "page_size": PAGE}
    driver = driver_for(model_files.BUILTIN, device="cuda", dtype=dtype, max_tokens_per_forward=512, **flags)
    outputs = score(driver, prompts)
    assert recompilations() + kernel_compilations() == 0
    assert {part.slot for output in outputs for part in output.scored} == set(prompts)
    for slot, prompt in prompts.items():
        with torch.inference_mode():
            table = expected(torch.tensor([prompt])).logits[0].log_softmax(-1)
        parts = [part for output in outputs for part in output.scored if part.slot == slot]
        known = LENGTHS[4] - 10 if slot == 4 else 0  # of what is cached nothing is scored
        check_scores(parts, prompt[known:], table[known:], TOP[slot], BOUNDS[dtype], first=known)


def test_a_long_prompt_takes_no_more_memory_than_the_boot_has_proved(driver_for, tmp_path):
    """All logits at once would take 4 GiB in float32, and 2 in bfloat16."""
    tokens, vocabulary = 8192, 128_256
    described = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": tokens,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    flags = {"max_tokens_per_forward": tokens, "max_seqs_per_forward": 8, "kv_cache_num_tokens": 2 * tokens}
    before = torch.cuda.memory_allocated()
    driver = driver_for(tmp_path, device="cuda", dtype="bfloat16", load_format="dummy", page_size=PAGE, **flags)
    proved = torch.cuda.max_memory_allocated()
    assert proved - before < 2 << 30
    torch.cuda.reset_peak_memory_stats()
    prompt = np.random.default_rng(0).integers(0, vocabulary, tokens)
    wanted = admission(0, prompt, range(tokens // PAGE), prompt_logprobs=20)
    (scored,) = driver.run(admissions=(wanted,), batch=batch([0], [tokens])).scored
    assert scored.top.counts.tolist() == [20] * (tokens - 1)
    assert np.isfinite(scored.logprobs).all()
    assert torch.cuda.max_memory_allocated() <= proved
