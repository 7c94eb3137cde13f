"""Mistral (dense)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.worker.models.config import ModelConfig, read_decoder

# What transformers takes for ``sliding_window`` where the config does not say; null is none.
_DEFAULT_WINDOW = 4096


def read_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """As Llama without biases. A token that attends to a window of the ones before it attends to all of them while
    there are no more: so contexts end where the window does."""
    made, window = read_decoder(config), config.get("sliding_window", _DEFAULT_WINDOW)
    return made if window is None else replace(made, max_context_tokens=min(made.max_context_tokens, window))
