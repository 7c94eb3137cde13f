"""Llama 2 and 3.x."""

from collections.abc import Mapping
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_decoder
from services.worker.described.layer import AttentionConfig, LayerConfig, MlpConfig


def read_llama(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Llama model.

    ``attention_bias`` applies to the q, k, v and output projections, ``mlp_bias`` to all three MLP projections.
    """
    given = JsonObject("config.json", config)
    bias = given.boolean("attention_bias")
    attention, mlp = AttentionConfig(qkv_bias=bias, output_bias=bias), MlpConfig(mlp_bias=given.boolean("mlp_bias"))
    return read_decoder(config, LayerConfig(attention=attention, mlp=mlp))
