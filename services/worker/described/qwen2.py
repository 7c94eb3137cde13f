"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from services.worker.described.config import ModelConfig, read_decoder, read_qwen_windows


def read_qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Qwen 2 model. Only the q, k and v projections have a bias."""
    return read_decoder(config, windows=read_qwen_windows(config), qkv_bias=True)
