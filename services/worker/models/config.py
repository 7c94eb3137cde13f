"""What a decoder-only transformer looks like, read from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.worker.layers.rope import RopeSettings, read_rope


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are counts of elements. One of these describes every architecture this worker runs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_context_tokens: int
    rope: RopeSettings
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rotation


def read_decoder(config: Mapping[str, Any], **features: bool) -> ModelConfig:
    """The part that all architectures here write alike; ``features`` are what the architecture adds.

    Raises ``InvalidRequest`` naming the key that is missing or not supported.
    """
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InvalidRequest(f"config.json: hidden_act={activation!r} is not supported; only 'silu' is", field="model")
    try:
        heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        max_context_tokens = config.get("max_position_embeddings", 2048)
        head_dim = config.get("head_dim") or hidden_size // heads
        made = ModelConfig(
            vocab_size=config["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            max_context_tokens=max_context_tokens,
            rope=read_rope(config, head_dim),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            **features,
        )
    except KeyError as error:
        raise InvalidRequest(f"config.json: {error.args[0]} is missing", field="model") from error
    if made.heads % made.kv_heads:
        raise InvalidRequest(
            f"config.json: num_attention_heads={made.heads} is not a multiple of num_key_value_heads={made.kv_heads}",
            field="model",
        )
    return made


def refuse_sliding_window(config: Mapping[str, Any]) -> None:
    """Raises ``InvalidRequest`` for a model that attends to a window only (Qwen writes the size even when unused)."""
    if config.get("use_sliding_window"):
        raise InvalidRequest(
            f"config.json: use_sliding_window=true (sliding_window={config.get('sliding_window')}) is not supported;"
            " choose a model with full attention",
            field="model",
        )
