"""Qwen 3 mixtures of experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_window
from services.worker.described.experts import read_count, read_experts
from services.worker.described.layer import AttentionConfig, LayerConfig, RouterConfig

_WINDOW, _KV_HEADS = 4096, 4  # defaults of transformers


def read_qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a Qwen 3 mixture of experts.

    Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``. All layers have the window.
    """
    given = JsonObject("config.json", config)
    bias, step = given.boolean("attention_bias"), read_count(given, "decoder_sparse_step", 1)
    dense = LayerConfig(attention=AttentionConfig(qkv_bias=bias, output_bias=bias, qk_norm="per_head"))
    router = RouterConfig(normalized=given.boolean("norm_topk_prob"))
    experts = read_experts(config, router, count="num_experts", width="moe_intermediate_size")
    only_dense = given.integers("mlp_only_layers") or ()
    layers = [
        dense if index in only_dense or (index + 1) % step else replace(dense, mlp=experts)
        for index in range(read_layers(config))
    ]
    window = read_window(config, _WINDOW) if given.boolean("use_sliding_window") else None
    defaults = {"num_key_value_heads": _KV_HEADS}
    return read_decoder(defaults | dict(config), layers, windows=(window,) * len(layers))
