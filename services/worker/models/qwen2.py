"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config import ModelConfig, read_decoder, refuse_sliding_window


def read_qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """q, k and v always have a bias, which the config does not say; nothing else has one."""
    refuse_sliding_window(config)
    return read_decoder(config, qkv_bias=True)
