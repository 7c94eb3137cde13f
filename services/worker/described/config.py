"""The description of a decoder-only transformer, read from a Hugging Face ``config.json``."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from services.common.errors import InvalidRequest
from services.common.model.context_length import MOST_TOKENS, context_length
from services.common.model.json_object import MOST_VOCABULARY, JsonObject
from services.common.model.quantized.scheme import Quantization
from services.worker.described.layer import LLAMA_LAYER, Activation, ExpertsConfig, LayerConfig
from services.worker.described.naming import Naming, one_to_one
from services.worker.described.rope import RopeSettings, read_rope, rotated_elements

# Defaults of transformers for keys that a Qwen config leaves out.
_QWEN_WINDOW, _QWEN_FULL_LAYERS, QWEN_KV_HEADS = 4096, 28, 32
# Names of transformers. Those of one activation compute the same up to rounding.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "relu_squared",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # the values of ``layer_types``
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
    head_dim: int  # elements of a head in the model and its cache, ``head_padding`` included
    norm_eps: float
    max_context_tokens: int
    ropes: tuple[RopeSettings, ...]  # the rotations that layers use, see ``AttentionConfig.rope``
    tied_embeddings: bool
    head_padding: int = 0  # elements of a head that the checkpoint does not have; they are zeros
    head_unrotated: int = 0  # last elements of a head in the checkpoint that no rotation turns
    norm_offset: float = 0.0  # added to the weights of all norms of the checkpoint
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of the outputs of attention and MLP
    logits_multiplier: float = 1.0
    final_soft_cap: float | None = None  # logits become cap * tanh(logit / cap); None = they are not capped
    # layers after the last layer, which predict further tokens (DeepSeek-AI 2024) and are not loaded
    prediction_layers: int = 0
    naming: Naming = one_to_one  # names of the tensors in the checkpoint
    quantization: Quantization | None = None  # of the checkpoint's weights; None = they are not quantized
    foreign: str | None = None  # the architecture, if transformers computes the model; sizes may then be estimates
    parameters: int | None = None  # elements of all weights of a foreign model; None = they follow from the layers

    @property
    def stored_head_dim(self) -> int:
        """Elements of a head in the checkpoint."""
        return self.head_dim - self.head_padding

    @property
    def rotated_dim(self) -> int:
        """First elements of a head in the checkpoint that rotations turn."""
        return self.stored_head_dim - self.head_unrotated

    @property
    def experts(self) -> tuple[ExpertsConfig, ...]:
        """The mixtures of experts of the layers that have one."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsConfig))

    @property
    def has_dense_layers(self) -> bool:
        """True if a layer has a dense MLP, of width ``intermediate_size``."""
        return len(self.experts) < len(self.layers)

    @property
    def windows(self) -> Windows:
        """Sliding windows of the layers, or () if no layer has one."""
        windows = tuple(layer.attention.window for layer in self.layers)
        return windows if any(windows) else ()

    @property
    def window_tokens(self) -> int:
        """The longest window if every layer has one, otherwise 0."""
        found = [window for window in self.windows if window is not None]
        return max(found) if len(found) == len(self.layers) else 0


def read_decoder(
    config: Mapping[str, Any],
    layers: LayerConfig | Sequence[LayerConfig] = LLAMA_LAYER,
    *,
    windows: Windows = (),
    activation: tuple[str, str] | None = ("hidden_act", "silu"),
    partial_rotation: float | None = None,
    norm_eps: float = 1e-6,
) -> ModelConfig:
    """Return the description of a model from the keys that all architectures share.

    ``layers`` describes each layer, or all of them. ``windows`` are their sliding windows; () means that no layer has
    one. ``activation`` is the key of the activation of all MLPs, and its default; None = as in ``layers``.
    ``partial_rotation`` is the default of ``partial_rotary_factor``; None = the architecture rotates whole heads.
    ``norm_eps`` is the default of ``rms_norm_eps``.

    Raises ``InvalidRequest`` naming the key that is missing, not supported, or of a wrong type or size.
    """
    given = JsonObject("config.json", config)
    heads = given.integer("num_attention_heads", most=_MOST_HEADS)
    hidden_size = given.integer("hidden_size", most=_MOST_WIDTH)
    max_context_tokens = context_length(config)
    head_dim = given.integer("head_dim", hidden_size // heads, most=_MOST_HEAD_DIM)
    if not head_dim:
        raise given.wrong("hidden_size", f"at least num_attention_heads={heads}")
    if isinstance(layers, LayerConfig):
        layers = (layers,) * read_layers(config)
    if activation is not None:
        found = read_activation(given, *activation)
        layers = [replace(layer, mlp=replace(layer.mlp, activation=found)) for layer in layers]
    rotated = rotated_elements(config, head_dim, partial_rotation)
    model = ModelConfig(
        vocab_size=given.integer("vocab_size", most=MOST_VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=given.integer("intermediate_size", most=_MOST_WIDTH),
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=window))
            for layer, window in zip(
                layers, _effective_windows(max_context_tokens, windows or (None,) * len(layers)), strict=True
            )
        ),
        heads=heads,
        kv_heads=given.integer("num_key_value_heads", heads, most=_MOST_HEADS),
        head_dim=head_dim,
        norm_eps=given.number("rms_norm_eps", norm_eps, most=1.0),
        max_context_tokens=max_context_tokens,
        ropes=(read_rope(config, rotated),),
        tied_embeddings=given.boolean("tie_word_embeddings"),
        head_unrotated=head_dim - rotated,
    )
    if model.heads % model.kv_heads:
        raise InvalidRequest(
            f"config.json: num_attention_heads={model.heads} is not a multiple of num_key_value_heads={model.kv_heads}",
            field="model",
        )
    return model


def read_activation(given: JsonObject, key: str, default: str) -> Activation:
    """Return the activation that ``key`` names. Raises ``InvalidRequest`` for a name that is not supported."""
    name = given.text(key, default)
    if name not in _ACTIVATIONS:
        raise given.wrong(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_width(given: JsonObject, key: str) -> int:
    """Return the number of columns ``key``. Raises ``InvalidRequest`` if it is missing or out of range."""
    return given.integer(key, most=_MOST_WIDTH)


def read_size(given: JsonObject, key: str, default: int | None = None) -> int:
    """Return the size ``key``, or ``default`` if it is missing. Raises ``InvalidRequest`` if it is out of range."""
    most = {"num_hidden_layers": _MOST_LAYERS, "num_attention_heads": _MOST_HEADS, "head_dim": _MOST_HEAD_DIM}
    return given.integer(key, default, most=most.get(key, _MOST_WIDTH))


def read_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises ``InvalidRequest`` if it is missing or out of range."""
    return JsonObject("config.json", config).integer("num_hidden_layers", most=_MOST_LAYERS)


def read_window(config: Mapping[str, Any], default: int | None) -> int | None:
    """Return ``sliding_window`` in tokens, or ``default`` if the key is absent.

    A null value gives None, which means full attention. Raises ``InvalidRequest`` if the value is not a valid size.
    """
    window = JsonObject("config.json", config).integer_or_none("sliding_window", most=MOST_TOKENS)
    return window if "sliding_window" in config else default


def read_layer_types(config: Mapping[str, Any], defaults: Sequence[str]) -> list[str]:
    """Return ``layer_types``: for each layer, ``full_attention`` or ``sliding_attention``.

    ``defaults`` are used if the key is absent. Raises ``InvalidRequest`` for another type or number of layers.
    """
    given, layers = JsonObject("config.json", config), read_layers(config)
    kinds = given.texts("layer_types")
    if kinds is None:
        return list(defaults)
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown or len(kinds) != layers:
        strange = f", among them {reprlib.repr(unknown[0])}" if unknown else ""
        raise InvalidRequest(
            f"config.json: layer_types has {len(kinds)} entries{strange};"
            f" expected {FULL!r} or {SLIDING!r} for each of num_hidden_layers={layers}",
            field="model",
        )
    return kinds


def windows_of(kinds: Sequence[str], window: int | None) -> Windows:
    """Return the windows of layers of the types ``kinds``, if the sliding ones have ``window``."""
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_alternating_windows(config: Mapping[str, Any], default: int, *, full_every: int) -> Windows:
    """Return the windows of a model in which every ``full_every``-th layer has none, unless ``layer_types`` differs.

    ``default`` is the window if ``sliding_window`` is absent.
    """
    kinds = [SLIDING if (index + 1) % full_every else FULL for index in range(read_layers(config))]
    return windows_of(read_layer_types(config, kinds), read_window(config, default))


def read_qwen_windows(config: Mapping[str, Any]) -> Windows:
    """Return the sliding windows of a Qwen model.

    ``layer_types`` names the layers that have a window. In older files, which lack this key, all layers from
    ``max_window_layers`` on have one. If ``use_sliding_window`` is false, all layers use full attention.

    Raises ``InvalidRequest`` for a type of layer that is not supported.
    """
    given, layers = JsonObject("config.json", config), read_layers(config)
    window = read_window(config, _QWEN_WINDOW) if given.boolean("use_sliding_window") else None
    first = given.integer("max_window_layers", _QWEN_FULL_LAYERS, least=0, most=_MOST_LAYERS)
    kinds = [SLIDING if index >= first else FULL for index in range(layers)]
    return windows_of(read_layer_types(config, kinds), window)


def _effective_windows(max_context_tokens: int, windows: Windows) -> Windows:
    """Return ``windows`` with None for each window that is at least as long as the context."""
    return tuple(window if window is not None and window < max_context_tokens else None for window in windows)
