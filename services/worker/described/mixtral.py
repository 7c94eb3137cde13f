"""Mixtral."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_window
from services.worker.described.experts import read_experts
from services.worker.described.layer import LayerConfig, RouterConfig
from services.worker.described.naming import CheckpointTensor, Shape, renamed

_THETA, _KV_HEADS = 1e6, 8  # defaults of transformers
_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


def read_mixtral(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Mixtral model: Llama with experts in every layer."""
    router = RouterConfig(normalized=True)
    experts = read_experts(config, router, width="intermediate_size")
    windows = (read_window(config, None),) * read_layers(config)
    config = {"rope_theta": _THETA, "num_key_value_heads": _KV_HEADS} | dict(config)
    return replace(read_decoder(config, LayerConfig(mlp=experts), windows=windows, norm_eps=1e-5), naming=_stored)


def _stored(shapes: Mapping[str, Shape]) -> dict[str, CheckpointTensor]:
    return renamed(shapes, _NAMES)
