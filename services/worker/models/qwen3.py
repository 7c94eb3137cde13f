"""Qwen 3 (dense)."""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config import ModelConfig, read_decoder, refuse_sliding_window


def read_qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """q and k are normed for each head; ``head_dim``, 128 where it is not stated, is not ``hidden_size / heads``."""
    refuse_sliding_window(config)
    bias = bool(config.get("attention_bias", False))
    return read_decoder({"head_dim": 128} | dict(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
