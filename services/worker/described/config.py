"""The description of a decoder-only transformer, read from a Hugging Face ``config.json``."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from services.common.errors import InvalidRequest
from services.common.model.context_length import MOST_TOKENS, context_length
from services.common.model.json_object import MOST_VOCABULARY, JsonObject
from services.worker.described.layer import LLAMA_LAYER, LayerConfig
from services.worker.described.rope import RopeSettings, read_rope

# Defaults of transformers for keys that a Qwen config leaves out.
_QWEN_WINDOW, _QWEN_FULL_LAYERS = 4096, 28
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Limits above every published model. A config beyond them is rejected before it is used to allocate memory.
_MOST_LAYERS, _MOST_HEADS, _MOST_HEAD_DIM, _MOST_WIDTH = 4096, 16_384, 4096, 1 << 20

# The ``window`` of each layer, see ``AttentionConfig``.
Windows: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, in elements, and layers of a model of any supported architecture."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_context_tokens: int
    rope: RopeSettings
    tied_embeddings: bool

    @property
    def windows(self) -> Windows:
        """Sliding windows of the layers, or () if no layer has one."""
        windows = tuple(layer.attention.window for layer in self.layers)
        return windows if any(windows) else ()


def read_decoder(config: Mapping[str, Any], layer: LayerConfig = LLAMA_LAYER, *, windows: Windows = ()) -> ModelConfig:
    """Return the description of a model from the keys that all architectures share.

    All layers are ``layer``. ``windows`` are their sliding windows; () means that no layer has one.

    Raises ``InvalidRequest`` naming the key that is missing, not supported, or of a wrong type or size.
    """
    given = JsonObject("config.json", config)
    if given.text("hidden_act", "silu") != "silu":
        raise given.wrong("hidden_act", "'silu', the only activation that is")
    heads = given.integer("num_attention_heads", most=_MOST_HEADS)
    hidden_size = given.integer("hidden_size", most=_MOST_WIDTH)
    max_context_tokens = context_length(config)
    head_dim = given.integer("head_dim", hidden_size // heads, most=_MOST_HEAD_DIM)
    if not head_dim:
        raise given.wrong("hidden_size", f"at least num_attention_heads={heads}")
    model = ModelConfig(
        vocab_size=given.integer("vocab_size", most=MOST_VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=given.integer("intermediate_size", most=_MOST_WIDTH),
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=window))
            for window in _effective_windows(max_context_tokens, windows or (None,) * read_layers(config))
        ),
        heads=heads,
        kv_heads=given.integer("num_key_value_heads", heads, most=_MOST_HEADS),
        head_dim=head_dim,
        norm_eps=given.number("rms_norm_eps", 1e-6, most=1.0),
        max_context_tokens=max_context_tokens,
        rope=read_rope(config, head_dim),
        tied_embeddings=given.boolean("tie_word_embeddings"),
    )
    if model.heads % model.kv_heads:
        raise InvalidRequest(
            f"config.json: num_attention_heads={model.heads} is not a multiple of num_key_value_heads={model.kv_heads}",
            field="model",
        )
    return model


def read_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises ``InvalidRequest`` if it is missing or out of range."""
    return JsonObject("config.json", config).integer("num_hidden_layers", most=_MOST_LAYERS)


def read_window(config: Mapping[str, Any], default: int) -> int | None:
    """Return ``sliding_window`` in tokens, or ``default`` if the key is absent.

    A null value gives None, which means full attention. Raises ``InvalidRequest`` if the value is not a valid size.
    """
    window = JsonObject("config.json", config).integer_or_none("sliding_window", most=MOST_TOKENS)
    return window if "sliding_window" in config else default


def read_qwen_windows(config: Mapping[str, Any]) -> Windows:
    """Return the sliding windows of a Qwen model.

    ``layer_types`` names the layers that have a window. In older files, which lack this key, all layers from
    ``max_window_layers`` on have one. If ``use_sliding_window`` is false, all layers use full attention.

    Raises ``InvalidRequest`` for a type of layer that is not supported.
    """
    given, layers = JsonObject("config.json", config), read_layers(config)
    window = read_window(config, _QWEN_WINDOW) if given.boolean("use_sliding_window") else None
    kinds = given.texts("layer_types")
    if kinds is None:
        first = given.integer("max_window_layers", _QWEN_FULL_LAYERS, least=0, most=_MOST_LAYERS)
        kinds = [_SLIDING if index >= first else _FULL for index in range(layers)]
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown or len(kinds) != layers:
        strange = f", among them {reprlib.repr(unknown[0])}" if unknown else ""
        raise InvalidRequest(
            f"config.json: layer_types has {len(kinds)} entries{strange};"
            f" expected {_FULL!r} or {_SLIDING!r} for each of num_hidden_layers={layers}",
            field="model",
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _effective_windows(max_context_tokens: int, windows: Windows) -> Windows:
    """Return ``windows`` with None for each window that is at least as long as the context."""
    return tuple(window if window is not None and window < max_context_tokens else None for window in windows)
