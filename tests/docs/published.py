"""Sizes in the ``config.json`` of published models, one of each architecture."""

from typing import Any

from services.worker.described.config import ModelConfig
from services.worker.described.registry import read_model_config

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The name of the model, and its sizes in the order of ``_SIZES``.
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
)
_MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Gemma2ForCausalLM": ("Gemma 2 9B", (256000, 3584, 42, 16, 8, 256, 14336, 8192), {"sliding_window": 4096}),
    "Gemma3ForCausalLM": ("Gemma 3 1B", (262144, 1152, 26, 4, 1, 256, 6912, 32768), {"sliding_window": 512}),
    "Glm4MoeForCausalLM": (
        "GLM-4.5-Air",
        (151552, 4096, 46, 96, 8, 128, 10944, 131072),
        {
            **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
            **{"n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True, "rope_theta": 1e6},
        },
    ),
    "GptOssForCausalLM": (
        "gpt-oss-20b",
        (201088, 2880, 24, 64, 8, 64, 2880, 131072),
        {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
    "GraniteForCausalLM": ("Granite 3.1 8B", (49155, 4096, 40, 32, 8, 128, 12800, 131072), {"rope_theta": 1e7}),
    "LlamaForCausalLM": (
        "Llama 3.1 8B",
        (128256, 4096, 32, 32, 8, 128, 14336, 131072),
        {"rope_theta": 5e5, "rope_scaling": _LLAMA3_ROPE},
    ),
    "MistralForCausalLM": ("Mistral 7B v0.3", (32768, 4096, 32, 32, 8, 128, 14336, 32768), {"sliding_window": None}),
    "MixtralForCausalLM": (
        "Mixtral 8x7B",
        (32000, 4096, 32, 32, 8, 128, 14336, 32768),
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Olmo2ForCausalLM": ("OLMo 2 7B", (100352, 4096, 32, 32, 32, 128, 11008, 4096), {"rope_theta": 5e5}),
    "Phi3ForCausalLM": ("Phi-4", (100352, 5120, 40, 40, 10, 128, 17920, 16384), {"rope_theta": 250000.0}),
    "Qwen2ForCausalLM": ("Qwen2.5 7B", (152064, 3584, 28, 28, 4, 128, 18944, 32768), {"rope_theta": 1e6}),
    "Qwen3ForCausalLM": ("Qwen3 8B", (151936, 4096, 36, 32, 8, 128, 12288, 40960), {"rope_theta": 1e6}),
    "Qwen3MoeForCausalLM": (
        "Qwen3-30B-A3B",
        (151936, 2048, 48, 32, 4, 128, 6144, 40960),
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    ),
    "SmolLM3ForCausalLM": ("SmolLM3 3B", (128256, 2048, 36, 16, 4, 128, 11008, 65536), {"rope_theta": 5e6}),
}


def published() -> dict[str, tuple[str, ModelConfig]]:
    """Return the name and the description of one published model of each architecture."""
    return {
        architecture: (
            name,
            read_model_config(dict(zip(_SIZES, sizes, strict=True)) | other | {"architectures": [architecture]}),
        )
        for architecture, (name, sizes, other) in _MODELS.items()
    }
