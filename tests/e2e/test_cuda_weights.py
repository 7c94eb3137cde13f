"""New weights for workers on GPUs that run: the same answers and checksums as those of a fresh deployment."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.e2e.test_weights import check_updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

PROMPTS = 500
FLAGS = {
    "device": "cuda",
    "kv_cache_num_tokens": 128 * 1024,
    "use_cudagraphs": "T",
    "torch_compile": "T",
    "fail_on_recompile": "T",
    "max_seqs_per_forward": 64,
    "max_tokens_per_forward": 512,
}

PLAIN = {"torch_compile": "F", "fail_on_recompile": "F"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for architecture in ("llama", "qwen3_moe"):
        for seed in range(2):
            # Sizes that fp8 products take.
            sizes = {"vocab_size": 416} | ({"moe_intermediate_size": 64} if architecture == "qwen3_moe" else {})
            make_checkpoint(directory / architecture / str(seed), architecture, seed=seed, **sizes)
    return directory


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "flags",
    # With several ranks, compilation takes minutes.
    [
        {},
        {"quantization": "fp8"},
        {"quantization": "int4"},
        {"dtype": "float32"},
        {"tp_size": 2} | PLAIN,
        {"pp_size": 2} | PLAIN,
    ],
    ids=["bf16", "fp8", "int4", "float32", "tp", "pp"],
)
def test_after_updates_answers_are_those_of_a_fresh_deployment(checkpoints, architecture, flags):
    if torch.cuda.device_count() < flags.get("tp_size", 1) * flags.get("pp_size", 1):
        pytest.skip("needs more CUDA devices")
    check_updates(checkpoints / architecture, FLAGS | flags, PROMPTS)
