"""Configurations of every native family, drawn from the settings that its config class in transformers has.

A variant is a family and a number. Ten successive numbers, from a multiple of ten on, have every value of a setting
with up to ten values. Half of the variants are written as files of transformers 4 are: with ``rope_theta`` and
``rope_scaling``, and without ``layer_types`` where these follow from other settings.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from tests.checkpoints import make_checkpoint

T = TypeVar("T")
_BLOCK = 10
# Query heads, key heads, head size. Two ranks can share each of them.
_SHAPES = ((4, 2, 16), (4, 1, 24), (4, 4, 32), (8, 2, 16), (2, 1, 80), (6, 2, 48), (8, 4, 24), (2, 2, 96))
_HIDDEN = (48, 72, 96, 120)
_WIDTHS = (50, 96, 130, 172)
_VOCABULARIES = (401, 416, 449, 500)
_EPS = (1e-6, 1e-5, 1e-3)
_THETAS = (10000.0, 500000.0, 1e6)
# Without relu2: rounding grows with its squares.
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 640  # tokens of a context
# The key of the activation and its published value, of other families than most. That of gpt-oss has no effect.
_ACTIVATION_KEYS = dict.fromkeys(("gemma2", "gemma3"), ("hidden_activation", "gelu_pytorch_tanh"))
_FULL, _SLIDING = "full_attention", "sliding_attention"
Settings = dict[str, Any]


class Variant(NamedTuple):
    """A configuration of a family."""

    family: str
    number: int

    def __str__(self) -> str:
        return f"{self.family}-{self.number}"


class Draw:
    """Draws the settings of one variant."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    def pick(self, name: str, *values: T) -> T:
        """Return one of ``values`` for the setting ``name``. The variants of a block have all values about equally."""
        block, index = divmod(self._variant.number, _BLOCK)
        deck = list(values) * -(-_BLOCK // len(values))
        random.Random(f"{self._variant.family} {name} {block}").shuffle(deck)
        return deck[index]

    def flag(self, name: str) -> bool:
        """Return true or false."""
        return self.pick(name, False, True)


def make_variant(directory: Path, variant: Variant) -> Path:
    """Write the checkpoint of ``variant`` into ``directory`` and return the directory."""
    draw = Draw(variant)
    settings = settings_of(variant)
    files = {"dtype": draw.pick("dtype", *_DTYPES), "sharded": draw.flag("sharded")}
    made = make_checkpoint(directory, variant.family, seed=variant.number, **files, **settings)
    if draw.flag("older file"):
        path = made / "config.json"
        config = _older(json.loads(path.read_text()), settings, draw)
        path.write_text(json.dumps(config, indent=2) + "\n")
    return made


def settings_of(variant: Variant) -> Settings:
    """Return what the config class of the family is given."""
    draw = Draw(variant)
    heads, kv_heads, head_dim = draw.pick("shape", *_SHAPES)
    hidden = draw.pick("hidden size", *_HIDDEN)
    key, usual = _ACTIVATION_KEYS.get(variant.family, ("hidden_act", "silu"))
    settings: Settings = {
        key: draw.pick("activation", *[usual] * len(_ACTIVATIONS), *_ACTIVATIONS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": draw.pick("width", *_WIDTHS),
        "num_hidden_layers": draw.pick("layers", 2, 3, 5, 7),
        "vocab_size": draw.pick("vocabulary", *_VOCABULARIES),
        "rms_norm_eps": draw.pick("eps", *_EPS),
        "max_position_embeddings": _LONGEST,
        "tied": draw.flag("tied"),
    }
    return settings | FAMILIES[variant.family](draw, settings)


def _derived_head(draw: Draw, settings: Settings) -> Settings:
    """Leave out ``head_dim`` in some variants, which then follows from other sizes."""
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    if hidden // heads % 2 or not draw.flag("derived head size"):
        return {}
    settings.pop("head_dim")
    return {}


def _rotation(draw: Draw, rotated: int, *kinds: str, **more: Any) -> Settings:
    """Return the rotation of ``rotated`` elements, and the length of a context that belongs to it."""
    kind = draw.pick("rotation", *(kinds or tuple(_ROTATIONS)))
    theta = {"rope_theta": draw.pick("theta", *_THETAS)}
    found, length = _ROTATIONS[kind](rotated)
    return {"rope_parameters": found | theta | more, "max_position_embeddings": length}


def _longrope(rotated: int, original: int, length: int, **more: Any) -> tuple[Settings, int]:
    short, long = ([start + step * index for index in range(rotated // 2)] for start, step in ((1, 0.1), (1.5, 1.0)))
    factors = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": original}
    return {"rope_type": "longrope"} | factors | more, length


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
# Each returns the settings without ``rope_theta``, and ``max_position_embeddings``.
_ROTATIONS: dict[str, Callable[[int], tuple[Settings, int]]] = {
    "default": lambda rotated: ({"rope_type": "default"}, _LONGEST),
    "linear": lambda rotated: ({"rope_type": "linear", "factor": 2.5}, _LONGEST),
    "dynamic": lambda rotated: ({"rope_type": "dynamic", "factor": 2.0}, 280),
    "llama3": lambda rotated: ({"rope_type": "llama3", "factor": 8.0} | _LLAMA3, _LONGEST),
    "yarn": lambda rotated: (_YARN, _LONGEST),
    "yarn of DeepSeek": lambda rotated: (_YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}, 160),
    "yarn of gpt-oss": lambda rotated: (_YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}, _LONGEST),
    "yarn with factor": lambda rotated: (_YARN | {"attention_factor": 1.3}, _LONGEST),
    "longrope, long": lambda rotated: _longrope(rotated, 128, _LONGEST),
    "longrope, short": lambda rotated: _longrope(rotated, _LONGEST, _LONGEST, factor=4.0),
}


def _kinds(draw: Draw, settings: Settings, pattern: list[str]) -> Settings:
    """Return ``layer_types`` in some variants: types that do not follow ``pattern``."""
    layers = settings["num_hidden_layers"]
    chosen = draw.pick("layer types", "pattern", "pattern", "full", "sliding", "reversed")
    if chosen == "pattern":
        return {}
    fixed = {"full": [_FULL] * layers, "sliding": [_SLIDING] * layers, "reversed": pattern[::-1]}
    return {"layer_types": fixed[chosen]}


def _every(layers: int, interval: int) -> list[str]:
    return [_SLIDING if (index + 1) % interval else _FULL for index in range(layers)]


def _experts(draw: Draw, count: str, width: str) -> Settings:
    experts = draw.pick("experts", 4, 6, 8, 16)
    chosen = draw.pick("chosen", 1, 2, 3, 4)
    return {count: experts, "num_experts_per_tok": chosen, width: draw.pick("expert width", 24, 40, 68)}


def _llama(draw: Draw, settings: Settings) -> Settings:
    rotation = _rotation(draw, settings["head_dim"])
    biases = {"attention_bias": draw.flag("attention bias"), "mlp_bias": draw.flag("MLP bias")}
    if "longrope" not in rotation["rope_parameters"]["rope_type"]:
        _derived_head(draw, settings)
    return biases | rotation


def _mistral(draw: Draw, settings: Settings) -> Settings:
    if draw.pick("rotation", "default", "yarn") == "default":
        _derived_head(draw, settings)
    return {
        "sliding_window": draw.pick("window", None, 1, 17, 40, 299, 4096),
        **_rotation(draw, settings.get("head_dim", 0), "default", "yarn"),
    }


def _mixtral(draw: Draw, settings: Settings) -> Settings:
    _derived_head(draw, settings)
    return {
        "sliding_window": draw.pick("window", None, None, 33),
        **_experts(draw, "num_local_experts", "intermediate_size"),
        **_rotation(draw, 0, "default", "linear", "llama3"),
    }


def _qwen_windows(draw: Draw, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    return {
        "use_sliding_window": draw.pick("uses window", True, True, False),
        "sliding_window": draw.pick("window", 20, 40, 64),
        "max_window_layers": draw.pick("window layers", 0, 1, layers - 1, 28),
    }


def _qwen2(draw: Draw, settings: Settings) -> Settings:
    _derived_head(draw, settings)
    found = _qwen_windows(draw, settings) | _rotation(draw, 0, "default", "yarn", "dynamic")
    return found | (
        _kinds(draw, settings, _every(settings["num_hidden_layers"], 2)) if found["use_sliding_window"] else {}
    )


def _qwen3(draw: Draw, settings: Settings) -> Settings:
    found = _qwen_windows(draw, settings) | _rotation(draw, 0, "default", "yarn", "linear")
    kinds = _kinds(draw, settings, _every(settings["num_hidden_layers"], 2)) if found["use_sliding_window"] else {}
    return found | kinds | {"attention_bias": draw.flag("attention bias")}


def _qwen3_moe(draw: Draw, settings: Settings) -> Settings:
    _derived_head(draw, settings)
    return {
        **_experts(draw, "num_experts", "moe_intermediate_size"),
        "attention_bias": draw.flag("attention bias"),
        "decoder_sparse_step": draw.pick("sparse step", 1, 1, 2, 3),
        "mlp_only_layers": draw.pick("dense layers", [], [0], [1, 4]),
        "norm_topk_prob": draw.flag("normalised"),
        "use_sliding_window": draw.flag("uses window"),
        "sliding_window": draw.pick("window", 20, 64),
        **_rotation(draw, 0, "default", "yarn"),
    }


def _glm4_moe(draw: Draw, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    groups, considered = draw.pick("groups", (1, 1), (2, 1), (4, 2), (2, 2))
    partial = draw.pick("partial rotation", 0.25, 0.5, 0.75, 1.0)
    rotated = int(settings["head_dim"] * partial)
    return {
        **_experts(draw, "n_routed_experts", "moe_intermediate_size"),
        **{"n_routed_experts": draw.pick("experts", 8, 16), "num_experts_per_tok": draw.pick("chosen", 1, 2, 3, 4)},
        "attention_bias": draw.flag("attention bias"),
        "first_k_dense_replace": draw.pick("dense layers", 0, 1, layers - 1, layers + 1),
        "n_group": groups,
        "topk_group": considered,
        "n_shared_experts": draw.pick("shared experts", 1, 2, 3),
        "norm_topk_prob": draw.flag("normalised"),
        "routed_scaling_factor": draw.pick("scaling factor", 1.0, 2.5),
        "use_qk_norm": draw.flag("head norms"),
        **_rotation(draw, rotated, "default", "yarn", "linear", "dynamic", partial_rotary_factor=partial),
    }


def _gpt_oss(draw: Draw, settings: Settings) -> Settings:
    found = {
        **_experts(draw, "num_local_experts", "intermediate_size"),
        "attention_bias": draw.flag("attention bias"),
        "sliding_window": draw.pick("window", 8, 40, 128),
        **_kinds(draw, settings, _every(settings["num_hidden_layers"], 2)),
    }
    if draw.pick("published rotation", True, False, False):
        return found | {"rope_parameters": None, "max_position_embeddings": 131072}
    return found | _rotation(draw, 0, "yarn of gpt-oss", "default", "yarn")


def _granite(draw: Draw, settings: Settings) -> Settings:
    _derived_head(draw, settings)
    return {
        "attention_bias": draw.flag("attention bias"),
        "mlp_bias": draw.flag("MLP bias"),
        "attention_multiplier": draw.pick("attention", 0.015625, 0.1, 0.25),
        "residual_multiplier": draw.pick("residual", 0.22, 1.0),
        "embedding_multiplier": draw.pick("embedding", 1.0, 4.0, 12),
        "logits_scaling": draw.pick("logits", 1.0, 0.8, 8),
        **_rotation(draw, 0, "default", "linear", "dynamic", "yarn"),
    }


def _olmo2(draw: Draw, settings: Settings) -> Settings:
    _derived_head(draw, settings)
    return {"attention_bias": draw.flag("attention bias"), **_rotation(draw, 0, "default", "yarn", "llama3")}


def _phi3(draw: Draw, settings: Settings) -> Settings:
    # The config class expects factors for heads of ``hidden_size / num_attention_heads`` elements.
    heads, kv_heads, head_dim = draw.pick("shape", (4, 2, 24), (4, 1, 16), (4, 4, 32), (8, 2, 16), (2, 1, 80))
    settings |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * head_dim}
    settings.pop("head_dim")
    partial = draw.pick("partial rotation", 1.0, 0.75, 0.5)
    rotation = _rotation(
        draw,
        int(head_dim * partial),
        *("default", "longrope, long", "longrope, short", "longrope, long", "default"),
        partial_rotary_factor=partial,
    )
    original = rotation["rope_parameters"].get("original_max_position_embeddings", _LONGEST)
    return {
        "sliding_window": draw.pick("window", None, 40, 262144),
        "original_max_position_embeddings": original,
        **rotation,
    }


def _smollm3(draw: Draw, settings: Settings) -> Settings:
    _derived_head(draw, settings)
    layers = settings["num_hidden_layers"]
    rotates = draw.pick(
        "rotating layers", None, None, [0] * layers, [1] * layers, [index % 2 for index in range(layers)]
    )
    interval = draw.pick("interval", 2, 3, 4)
    found = {
        "no_rope_layers": rotates,
        "no_rope_layer_interval": interval,
        "use_sliding_window": draw.flag("uses window"),
        "attention_bias": draw.flag("attention bias"),
        "mlp_bias": draw.flag("MLP bias"),
        **_rotation(draw, 0, "default", "yarn", "linear"),
    }
    if draw.pick("no window", False, False, True):
        return found
    return found | {"sliding_window": draw.pick("window", 20, 64)} | _kinds(draw, settings, _every(layers, 2))


def _gemma(draw: Draw, settings: Settings) -> Settings:
    return {
        "attention_bias": draw.flag("attention bias"),
        "query_pre_attn_scalar": draw.pick("attention scalar", 24, 64, 256),
        "attn_logit_softcapping": draw.pick("score cap", None, 2.0, 50.0),
        "final_logit_softcapping": draw.pick("logit cap", None, 3.0, 30.0),
        "sliding_window": draw.pick("window", 8, 40, 4096),
    }


def _gemma2(draw: Draw, settings: Settings) -> Settings:
    kinds = _kinds(draw, settings, _every(settings["num_hidden_layers"], 2))
    return _gemma(draw, settings) | kinds | _rotation(draw, 0, "default", "linear", "yarn")


def _gemma3(draw: Draw, settings: Settings) -> Settings:
    pattern = draw.pick("pattern", 2, 3, 6)
    rotation = _rotation(draw, 0, "default", "linear", "yarn", "yarn of gpt-oss")
    local = {"rope_type": "default", "rope_theta": draw.pick("local theta", 10000.0, 1000.0)}
    return {
        **_gemma(draw, settings),
        "sliding_window_pattern": pattern,
        **_kinds(draw, settings, _every(settings["num_hidden_layers"], pattern)),
        **rotation,
        "rope_parameters": {_FULL: rotation["rope_parameters"], _SLIDING: local},
    }


FAMILIES: dict[str, Callable[[Draw, Settings], Settings]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
# Names of the number of experts in published files.
_COUNTS = {"qwen3_moe": "num_experts", "glm4_moe": "n_routed_experts"}


def _older(config: Settings, settings: Settings, draw: Draw) -> Settings:
    """Return ``config``, which transformers 5 wrote, as an older file."""
    rope = config.pop("rope_parameters")
    if "layer_types" not in settings:
        config.pop("layer_types", None)
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope[_SLIDING]["rope_theta"]
        rope = rope[_FULL]
    count = _COUNTS.get(config["model_type"])
    if count and "num_local_experts" in config:
        config[count] = config.pop("num_local_experts")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    if config["model_type"] == "phi3" and kind == "longrope":
        kind = draw.pick("name of the rotation", "longrope", "su", "yarn")
    config["rope_scaling"] = (
        None if kind == "default" else {draw.pick("key of the kind", "type", "rope_type"): kind, **rope}
    )
    return config
