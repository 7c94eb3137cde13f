"""Granite 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_decoder
from services.worker.described.layer import AttentionConfig, LayerConfig, MlpConfig

_MOST, _LEAST = 1e6, 1e-6


def read_granite(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a dense Granite 3 model: Llama with multipliers of four quantities."""
    given = JsonObject("config.json", config)
    bias = given.boolean("attention_bias")
    scale, residual, embedding, logits = (
        given.number(name, 1.0, least=_LEAST, most=_MOST)
        for name in ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")
    )
    attention = AttentionConfig(qkv_bias=bias, output_bias=bias, scale=scale)
    layer = LayerConfig(attention=attention, mlp=MlpConfig(mlp_bias=given.boolean("mlp_bias")))
    return replace(
        read_decoder(config, layer),
        residual_multiplier=residual,
        embedding_multiplier=embedding,
        logits_multiplier=1 / logits,
    )
