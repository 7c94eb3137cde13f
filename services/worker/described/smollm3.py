"""SmolLM 3. SmolLM 2 is a Llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import (
    FULL,
    SLIDING,
    ModelConfig,
    read_decoder,
    read_layer_types,
    read_layers,
    read_window,
    windows_of,
)
from services.worker.described.layer import AttentionConfig, LayerConfig, MlpConfig

_THETA, _KV_HEADS, _ROTATED_INTERVAL = 2e6, 4, 4


def read_smollm3(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a SmolLM 3 model: Llama in which every fourth layer does not rotate q and k.

    ``no_rope_layers`` has a 1 for each layer that rotates, and may be longer than the model.
    """
    given, count = JsonObject("config.json", config), read_layers(config)
    interval = given.integer("no_rope_layer_interval", _ROTATED_INTERVAL, most=4096)
    rotates = given.integers("no_rope_layers")
    if rotates is None:
        rotates = [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotates) < count or not {0, 1}.issuperset(rotates):
        raise given.wrong("no_rope_layers", f"0 or 1 for each of num_hidden_layers={count}")
    rotates = rotates[:count]
    window, slides = read_window(config, None), given.boolean("use_sliding_window")
    kinds = [SLIDING if slides and not turns else FULL for turns in rotates]
    windows = windows_of(read_layer_types(config, kinds), window)
    bias = given.boolean("attention_bias")
    attention = AttentionConfig(qkv_bias=bias, output_bias=bias)
    layer = LayerConfig(attention=attention, mlp=MlpConfig(mlp_bias=given.boolean("mlp_bias")))
    layers = [replace(layer, attention=replace(attention, rope=0 if turns else None)) for turns in rotates]
    defaults = {"rope_theta": _THETA, "num_key_value_heads": _KV_HEADS, "tie_word_embeddings": True}
    return read_decoder(defaults | dict(config), layers, windows=windows)
