"""The description of a decoder-only transformer, read from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.common.context_length import context_length
from services.common.errors import InvalidRequest
from services.worker.layers.rope import RopeSettings, read_rope

# Values that transformers takes for keys that a Qwen config leaves out.
_QWEN_WINDOW, _QWEN_FULL_LAYERS = 4096, 28
_FULL, _SLIDING = "full_attention", "sliding_attention"

# For each layer, the number of most recent tokens that a token attends to, itself included; None = all tokens.
Windows: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and features of a model, in elements. Every architecture of this worker is described by one."""

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
    windows: Windows = ()  # sliding window of each layer, see ``Windows``; () = no layer has one


def read_decoder(config: Mapping[str, Any], windows: Windows = (), **features: bool) -> ModelConfig:
    """Return the description that all architectures share, with the ``windows`` and ``features`` of one of them.

    Raises ``InvalidRequest`` naming the key that is missing or not supported.
    """
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InvalidRequest(f"config.json: hidden_act={activation!r} is not supported; only 'silu' is", field="model")
    try:
        heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        max_context_tokens = context_length(config)
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
            windows=_shorter_than(max_context_tokens, windows),
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


def read_qwen_windows(config: Mapping[str, Any]) -> Windows:
    """Return the sliding windows of a Qwen model: ``layer_types`` names the layers that have one, or, in older files,
    all layers from ``max_window_layers`` on have one. Without ``use_sliding_window`` the size has no effect.

    Raises ``InvalidRequest`` for a type of layer that is not supported.
    """
    layers = config.get("num_hidden_layers", 0)
    window = config.get("sliding_window", _QWEN_WINDOW) if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", _QWEN_FULL_LAYERS)
        kinds = [_SLIDING if index >= first else _FULL for index in range(layers)]
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown or len(kinds) != layers:
        raise InvalidRequest(
            f"config.json: layer_types has {len(kinds)} entries{f', among them {unknown[0]!r}' if unknown else ''};"
            f" expected {_FULL!r} or {_SLIDING!r} for each of num_hidden_layers={layers}",
            field="model",
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _shorter_than(max_context_tokens: int, windows: Windows) -> Windows:
    """Return ``windows`` without those that no context exceeds."""
    made = tuple(window if window is not None and window < max_context_tokens else None for window in windows)
    return made if any(made) else ()
