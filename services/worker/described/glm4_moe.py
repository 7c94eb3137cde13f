"""GLM-4.5 and 4.6."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_decoder, read_layers, read_width
from services.worker.described.experts import read_count, read_experts
from services.worker.described.layer import AttentionConfig, LayerConfig, RouterConfig

_PARTIAL_ROTATION, _NORM_EPS, _KV_HEADS = 0.5, 1e-5, 8


def read_glm4_moe(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a GLM-4.5 model.

    The first ``first_k_dense_replace`` layers are dense. The others have a router of sigmoids with a correction bias,
    and a shared expert.
    """
    given = JsonObject("config.json", config)
    attention = AttentionConfig(
        qkv_bias=given.boolean("attention_bias"), qk_norm="per_head" if given.boolean("use_qk_norm") else "none"
    )
    dense = LayerConfig(attention=attention)
    router = RouterConfig(
        scores="sigmoid",
        normalized=given.boolean("norm_topk_prob", True),
        correction_bias=True,
        groups=read_count(given, "n_group", 1),
        chosen_groups=read_count(given, "topk_group", 1),
        scale=given.number("routed_scaling_factor", 1.0, most=1e6),
    )
    experts = read_experts(
        config,
        router,
        count="n_routed_experts",
        width="moe_intermediate_size",
        shared_width=read_count(given, "n_shared_experts", 1) * read_width(given, "moe_intermediate_size"),
    )
    layers = read_layers(config)
    first = read_count(given, "first_k_dense_replace", 1, least=0)
    described = [dense if index < first else replace(dense, mlp=experts) for index in range(layers)]
    config = {"num_key_value_heads": _KV_HEADS} | dict(config)
    model = read_decoder(config, described, partial_rotation=_PARTIAL_ROTATION, norm_eps=_NORM_EPS)
    return replace(model, prediction_layers=read_count(given, "num_nextn_predict_layers", 1, least=0))
