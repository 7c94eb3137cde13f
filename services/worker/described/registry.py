"""Supported architectures, by their names in ``architectures`` of ``config.json``."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model.json_object import JsonObject
from services.common.model.quantized.settings import read_quantization
from services.worker.described.config import ModelConfig
from services.worker.described.gemma import read_gemma2, read_gemma3
from services.worker.described.glm4_moe import read_glm4_moe
from services.worker.described.gpt_oss import read_gpt_oss
from services.worker.described.granite import read_granite
from services.worker.described.llama import read_llama
from services.worker.described.mistral import read_mistral
from services.worker.described.mixtral import read_mixtral
from services.worker.described.olmo2 import read_olmo2
from services.worker.described.phi3 import read_phi3
from services.worker.described.qwen2 import read_qwen2
from services.worker.described.qwen3 import read_qwen3
from services.worker.described.qwen3_moe import read_qwen3_moe
from services.worker.described.smollm3 import read_smollm3

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "GptOssForCausalLM": read_gpt_oss,
    "GraniteForCausalLM": read_granite,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "Olmo2ForCausalLM": read_olmo2,
    "Phi3ForCausalLM": read_phi3,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "SmolLM3ForCausalLM": read_smollm3,
}


def architecture_names(config: Mapping[str, Any]) -> list[str]:
    """Return ``architectures`` of ``config.json``, or []. Raises ``InvalidRequest`` if it is no list of names."""
    return JsonObject("config.json", config).texts("architectures") or []


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the native description of the model. Raises ``InvalidRequest`` if its architecture has none."""
    named = architecture_names(config)
    for name in named:
        if name in ARCHITECTURES:
            return replace(ARCHITECTURES[name](config), quantization=read_quantization(config))
    raise InvalidRequest(
        f"config.json: architectures={reprlib.repr(named)} is not supported; choose a model of"
        f" {', '.join(ARCHITECTURES)}",
        field="model",
    )
