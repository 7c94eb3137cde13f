"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from services.worker.described.config import QWEN_KV_HEADS, ModelConfig, read_decoder, read_qwen_windows
from services.worker.described.layer import AttentionConfig, LayerConfig


def read_qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Qwen 2 model. Only the q, k and v projections have a bias."""
    layer = LayerConfig(attention=AttentionConfig(qkv_bias=True))
    return read_decoder({"num_key_value_heads": QWEN_KV_HEADS} | dict(config), layer, windows=read_qwen_windows(config))
