"""Mistral (dense)."""

from collections.abc import Mapping
from typing import Any

from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_window

# Defaults of transformers for keys that the config leaves out. A null window means full attention.
_DEFAULT_WINDOW = 4096
_KV_HEADS = 8


def read_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Mistral model: Llama without biases, with the sliding window in every layer."""
    windows = (read_window(config, _DEFAULT_WINDOW),) * read_layers(config)
    return read_decoder({"num_key_value_heads": _KV_HEADS} | dict(config), windows=windows)
