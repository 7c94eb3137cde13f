"""Phi-3, Phi-3.5 and Phi-4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_window
from services.worker.described.naming import CheckpointTensor, Shape, joined

_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ORIGINAL = 4096  # default of transformers, which overrides a length among the settings of the rotation
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def read_phi3(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Phi-3 model: Llama with fewer, larger tensors, and a window in every layer."""
    config = {"original_max_position_embeddings": _ORIGINAL} | dict(config)
    for key in _ROPE_KEYS:
        settings = config.get(key)
        # Older files have earlier names of the same rotation.
        for kind in ("type", "rope_type"):
            if isinstance(settings, dict) and settings.get(kind) in ("su", "yarn"):
                config[key] = settings = settings | {kind: "longrope"}
    windows = (read_window(config, None),) * read_layers(config)
    return replace(read_decoder(config, windows=windows, partial_rotation=1.0, norm_eps=1e-5), naming=_stored)


def _stored(shapes: Mapping[str, Shape]) -> dict[str, CheckpointTensor]:
    return joined(shapes, _JOINED)
