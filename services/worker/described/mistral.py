"""Mistral (dense)."""

from collections.abc import Mapping
from typing import Any

from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_window

# Default of transformers if the config leaves out ``sliding_window``. A null value means full attention.
_DEFAULT_WINDOW = 4096


def read_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Mistral model: Llama without biases, with the sliding window in every layer."""
    return read_decoder(config, windows=(read_window(config, _DEFAULT_WINDOW),) * read_layers(config))
