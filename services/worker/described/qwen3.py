"""Qwen 3 (dense)."""

from collections.abc import Mapping
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import QWEN_KV_HEADS, ModelConfig, read_decoder, read_qwen_windows
from services.worker.described.layer import AttentionConfig, LayerConfig


def read_qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Qwen 3 model.

    q and k are normalised per head. ``head_dim`` defaults to 128.
    """
    bias = JsonObject("config.json", config).boolean("attention_bias")
    layer = LayerConfig(attention=AttentionConfig(qkv_bias=bias, output_bias=bias, qk_norm="per_head"))
    defaults = {"head_dim": 128, "num_key_value_heads": QWEN_KV_HEADS}
    return read_decoder(defaults | dict(config), layer, windows=read_qwen_windows(config))
