"""Models that are compared with transformers on several ranks, and the numbers of ranks."""

from typing import Any

import numpy as np

# Query and key heads are in the same proportion on one rank and on several: fewer kernels to compile.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "tied": ("llama", SIZES | {"tied": True}),
    "biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "few key heads": ("llama", SIZES | {"num_key_value_heads": 2}),
    "norms of copied heads": ("olmo2", SIZES | {"num_key_value_heads": 2}),
    "mistral": ("mistral", SIZES),
    "windows": ("qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3}),
    "qwen2": ("qwen2", SIZES | {"tied": True}),
    "qwen3": ("qwen3", SIZES),
    "experts": ("qwen3_moe", SIZES),
    "sinks": ("gpt_oss", SIZES),
    "shared experts": ("glm4_moe", SIZES | {"first_k_dense_replace": 2}),
    "norms on both sides": ("gemma3", SIZES),
    "norms of all heads": ("olmo2", SIZES),
    "joined tensors": ("phi3", SIZES),
    "multipliers": ("granite", SIZES | {"attention_bias": True}),
    "soft caps": ("gemma2", SIZES),
    "mixtral": ("mixtral", SIZES),
    "unrotated layers": ("smollm3", SIZES),
}
FAMILIES = tuple(MODELS)[9:]
GRIDS = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
CASES = [
    *[("llama", *grid) for grid in GRIDS],
    *[(name, *grid) for name in ("qwen2", "qwen3") for grid in GRIDS[:2]],
    *[(name, *grid) for name in FAMILIES for grid in GRIDS[:2]],
    *[("biases", 2, 1), ("few key heads", 4, 1), ("norms of copied heads", 4, 1), ("tied", 2, 2), ("mistral", 2, 2)],
    ("windows", 1, 2),
]
# Where there are ranks to shard over, both ways to exchange.
CASES = [(*case, sharded) for case in CASES for sharded in (False, True) if case[1] > 1 or not sharded]
# Ranks with whole experts.
EXPERT_CASES = [(name, 2, 1) for name in ("experts", "mixtral", "sinks", "shared experts")]
EXPERT_CASES += [("experts", 4, 1), ("experts", 2, 2)]
EXPERT_CASES = [(*case, sharded) for case in EXPERT_CASES for sharded in (False, True)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return ``length`` token ids. Equal arguments give equal ones."""
    return np.random.default_rng(seed).integers(2, 390, length).tolist()
