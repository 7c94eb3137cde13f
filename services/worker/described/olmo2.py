"""OLMo 2."""

from collections.abc import Mapping
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_decoder
from services.worker.described.layer import AttentionConfig, LayerConfig


def read_olmo2(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of an OLMo 2 model: norms after attention and MLP, and of q and k as a whole."""
    bias = JsonObject("config.json", config).boolean("attention_bias")
    attention = AttentionConfig(qkv_bias=bias, output_bias=bias, qk_norm="whole")
    return read_decoder(config, LayerConfig(norm_placement="after", attention=attention), norm_eps=1e-5)
