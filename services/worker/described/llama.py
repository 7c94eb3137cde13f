"""Llama 2 and 3.x."""

from collections.abc import Mapping
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_decoder


def read_llama(config: Mapping[str, Any]) -> ModelConfig:
    """``attention_bias`` covers q, k, v and the output projection; ``mlp_bias`` all three of the MLP."""
    given = JsonObject("config.json", config)
    bias = given.boolean("attention_bias")
    return read_decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=given.boolean("mlp_bias"))
