"""Qwen 3 (dense)."""

from collections.abc import Mapping
from typing import Any

from services.worker.models.config import ModelConfig, read_decoder, read_qwen_windows


def read_qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Qwen 3 model: q and k are normed for each head, and ``head_dim`` is 128 unless the
    config states it."""
    bias = bool(config.get("attention_bias", False))
    windows = read_qwen_windows(config)
    return read_decoder({"head_dim": 128} | dict(config), windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
