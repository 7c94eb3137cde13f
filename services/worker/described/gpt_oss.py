"""gpt-oss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.model.json_object import JsonObject
from services.worker.described.config import ModelConfig, read_alternating_windows, read_decoder
from services.worker.described.experts import read_experts
from services.worker.described.layer import AttentionConfig, LayerConfig, RouterConfig
from services.worker.described.naming import CheckpointTensor, Part, Shape, renamed

_WINDOW, _HEAD_DIM, _KV_HEADS = 128, 64, 8
# The rotation of the published models, and so of files without ``rope_parameters``.
_THETA = 150000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GATED_UNIT = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def read_gpt_oss(config: Mapping[str, Any]) -> ModelConfig:
    """Return the description of a gpt-oss model.

    Every second layer has a window, and all have attention sinks. All products have a bias.
    """
    given = JsonObject("config.json", config)
    for name, supported in _GATED_UNIT.items():
        if given.number(name, supported, most=1e6) != supported:
            raise given.wrong(name, f"{supported:g}, the only value")
    config = {"head_dim": _HEAD_DIM, "num_key_value_heads": _KV_HEADS, "rope_theta": _THETA} | dict(config)
    if config.get("rope_parameters") is None and not given.object("rope_scaling").values:
        config["rope_parameters"] = _ROPE
    bias = given.boolean("attention_bias", True)
    router = RouterConfig(scores="softmax_of_chosen", bias=True)
    experts = read_experts(
        config,
        router,
        width="intermediate_size",
        activation="clamped_swiglu",
        expert_bias=True,
    )
    layer = LayerConfig(attention=AttentionConfig(qkv_bias=bias, output_bias=bias, sinks=True), mlp=experts)
    windows = read_alternating_windows(config, _WINDOW, full_every=2)
    model = read_decoder(config, layer, windows=windows, activation=None, norm_eps=1e-5)
    return replace(model, naming=_stored)


def _stored(shapes: Mapping[str, Shape]) -> dict[str, CheckpointTensor]:
    """Return the tensors of the checkpoint, in which one tensor holds all experts of a layer.

    The columns of ``gate_up_proj [experts, hidden_size, 2 * width]`` alternate between gate and up.
    """
    separate = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    stored = renamed(separate, {".mlp.gate.": ".mlp.router."})
    for name, shape in shapes.items():
        if name in separate:
            continue
        layer, rest = name.split(".experts.")
        index, module, kind = rest.split(".")
        expert, transposed = int(index), kind == "weight"
        fused = module in ("gate_proj", "up_proj")
        whole = f"{layer}.experts.{'gate_up_proj' if fused else module}{'_bias' * (kind == 'bias')}"
        first = ("gate_proj", "up_proj").index(module) if fused else None
        columns = shape[0] * (2 if fused else 1)
        stored_shape = (expert + 1, shape[1], columns) if transposed else (expert + 1, columns)
        before = stored[whole].parts if whole in stored else ()
        stored[whole] = CheckpointTensor(stored_shape, (*before, Part(name, expert, first, transposed)))
    return stored
