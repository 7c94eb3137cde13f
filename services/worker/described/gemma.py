"""Gemma 2, and the text models of Gemma 3."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_alternating_windows, read_decoder
from services.worker.described.layer import AttentionConfig, LayerConfig
from services.worker.described.rope import read_rope

_HEAD_DIM, _KV_HEADS, _WINDOW = 256, 4, 4096
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_MOST_CAP = 1e6
_BESIDE_ROTATIONS = ("rope_scaling", "rope_theta", "original_max_position_embeddings")


def read_gemma2(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Gemma 2 model: soft caps, and a window in every second layer."""
    cap = _cap(JsonObject("config.json", config), "attn_logit_softcapping", _SCORE_CAP)
    model = _read(config, full_every=2, logit_cap=_LOGIT_CAP, soft_cap=cap)
    _refuse_bidirectional(config)
    return model


def read_gemma3(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of the text model of Gemma 3.

    Five of six layers have a window and a rotation of their own. q and k are normalised per head. As in transformers,
    ``attn_logit_softcapping`` has no effect.
    """
    _refuse_bidirectional(config)
    given = JsonObject("config.json", config)
    pattern = given.integer("sliding_window_pattern", 6, most=4096)
    whole, local = _rotations(config)
    model = _read(whole, full_every=pattern, qk_norm="per_head")
    ropes = (*model.ropes, read_rope(local, model.rotated_dim))
    windows = read_alternating_windows(config, _WINDOW, full_every=pattern)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, rope=int(window is not None)))
        for layer, window in zip(model.layers, windows, strict=True)
    )
    return replace(model, layers=layers, ropes=ropes)


def _read(
    config: Mapping[str, Any],
    *,
    full_every: int,
    logit_cap: float | None = None,
    **attention: Any,
) -> ModelConfig:
    """Return the description that Gemma 2 and 3 share. ``logit_cap`` is the default of an absent key."""
    given = JsonObject("config.json", config)
    defaults = {"head_dim": _HEAD_DIM, "num_key_value_heads": _KV_HEADS, "tie_word_embeddings": True}
    config = defaults | dict(config)
    bias = given.boolean("attention_bias")
    scale = given.number("query_pre_attn_scalar", 256, least=1e-6, most=1e9) ** -0.5
    layer = LayerConfig(
        norm_placement="both",
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, scale=scale, **attention),
    )
    windows = read_alternating_windows(config, _WINDOW, full_every=full_every)
    model = read_decoder(config, layer, windows=windows, activation=("hidden_activation", "gelu_pytorch_tanh"))
    return replace(
        model,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(model.hidden_size),
        final_soft_cap=_cap(given, "final_logit_softcapping", logit_cap),
    )


def _cap(given: JsonObject, key: str, default: float | None) -> float | None:
    """Return a soft cap, or ``default`` if the key is absent. A null value gives None."""
    cap = given.number_or_none(key, least=1e-6, most=_MOST_CAP)
    return cap if key in given.values else default


def _rotations(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``config`` as read by ``read_rope``: with the rotation of layers without a window, and of the others.

    transformers 5 has both in ``rope_parameters``. Older files have ``rope_theta`` with ``rope_scaling`` for the
    former, and ``rope_local_base_freq`` for the latter. As in transformers, two settings have no effect: ``truncate``,
    and an ``original_max_position_embeddings`` beside the rotations.
    """
    given = JsonObject("config.json", config)
    both = given.object("rope_parameters")
    whole, local = (dict(both.object(kind).values) for kind in ("full_attention", "sliding_attention"))
    whole |= given.object("rope_scaling").values
    thetas = (
        given.number("rope_theta", _GLOBAL_THETA, most=1e12),
        given.number("rope_local_base_freq", _LOCAL_THETA, most=1e12),
    )
    rest = {key: value for key, value in config.items() if key not in _BESIDE_ROTATIONS}
    whole, local = (
        {"rope_theta": theta, "rope_type": "default"} | settings | {"truncate": True}
        for theta, settings in zip(thetas, (whole, local), strict=True)
    )
    return rest | {"rope_parameters": whole}, rest | {"rope_parameters": local}


def _refuse_bidirectional(config: Mapping[str, Any]) -> None:
    if JsonObject("config.json", config).boolean("use_bidirectional_attention"):
        raise InvalidRequest(
            "config.json: use_bidirectional_attention=true is an encoder, which cannot generate; choose another model",
            field="model",
        )
