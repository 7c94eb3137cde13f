"""Supported architectures, by their names in ``architectures`` of ``config.json``."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig
from services.worker.described.llama import read_llama
from services.worker.described.mistral import read_mistral
from services.worker.described.qwen2 import read_qwen2
from services.worker.described.qwen3 import read_qwen3

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of the model. Raises ``InvalidRequest`` if its architecture is not supported."""
    named = JsonObject("config.json", config).texts("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name](config)
    raise InvalidRequest(
        f"config.json: architectures={reprlib.repr(named)} is not supported; choose a model of"
        f" {', '.join(ARCHITECTURES)}",
        field="model",
    )
