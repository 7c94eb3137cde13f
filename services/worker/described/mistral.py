"""Mistral (dense)."""

from collections.abc import Mapping
from typing import Any

from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_window

# The value that transformers takes for ``sliding_window`` if the config leaves it out; null means full attention.
_DEFAULT_WINDOW = 4096


def read_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Mistral model: as Llama without biases, and every layer has the sliding window."""
    return read_decoder(config, windows=(read_window(config, _DEFAULT_WINDOW),) * read_layers(config))
