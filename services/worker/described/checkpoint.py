"""Names and shapes of a checkpoint's tensors, derived from the model config."""

import math
from dataclasses import replace

from services.worker.described.config import ModelConfig
from services.worker.described.layer import ExpertsConfig, LayerConfig, MlpConfig
from services.worker.described.naming import CheckpointTensor, Shape

# Suffixes of tensors that loading ignores: older checkpoints store rotary frequencies, which the config determines.
DERIVED = ("rotary_emb.inv_freq",)
# Names of the embedding and of the head, which may be tied to it.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Names of a layer's norms, by their placement: those around the attention, then those around the MLP.
NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


def checkpoint_tensors(model: ModelConfig) -> dict[str, CheckpointTensor]:
    """Return the tensors in a checkpoint of ``model``, by name."""
    return model.naming(model_shapes(model))


def checkpoint_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shape of each tensor in a checkpoint of ``model``, by name."""
    return {name: stored.shape for name, stored in checkpoint_tensors(model).items()}


def is_ignored(name: str, model: ModelConfig) -> bool:
    """Return whether loading ignores the checkpoint's tensor ``name``.

    Some files have a copy of the embedding for a head that is tied to it, or layers that predict further tokens.
    """
    if model.tied_embeddings and name == HEAD:
        return True
    further = range(len(model.layers), len(model.layers) + model.prediction_layers)
    return name.endswith(DERIVED) or any(name.startswith(f"model.layers.{index}.") for index in further)


def model_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shape of each tensor of ``model``, with heads as in the checkpoint, by the model's names."""
    model = replace(model, head_dim=model.stored_head_dim, head_padding=0)
    vocabulary = (model.vocab_size, model.hidden_size)
    shapes: dict[str, Shape] = {EMBEDDING: vocabulary}
    if not model.tied_embeddings:
        shapes[HEAD] = vocabulary
    shapes["model.norm.weight"] = (model.hidden_size,)
    for index, layer in enumerate(model.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(model, layer).items()}
    return shapes


def layer_shapes(model: ModelConfig, layer: LayerConfig, *, adds_bias: bool = True) -> dict[str, Shape]:
    """Return the shape of each tensor in ``layer`` of ``model``, by its name inside the layer.

    With ``adds_bias`` false, ``o_proj`` and ``down_proj`` have no bias. Their outputs are summed over tensor-parallel
    ranks, and only one rank adds the bias.
    """
    hidden = model.hidden_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    features = layer.attention
    shapes: dict[str, Shape] = dict.fromkeys(norm_names(layer), (hidden,))
    for name, outputs, inputs, bias in (
        ("q_proj", queries, hidden, features.qkv_bias),
        ("k_proj", keys, hidden, features.qkv_bias),
        ("v_proj", keys, hidden, features.qkv_bias),
        ("o_proj", hidden, queries, features.output_bias and adds_bias),
    ):
        shapes |= _linear(f"self_attn.{name}", outputs, inputs, bias)
    if features.qk_norm != "none":
        whole = features.qk_norm == "whole"
        shapes["self_attn.q_norm.weight"] = (queries if whole else model.head_dim,)
        shapes["self_attn.k_norm.weight"] = (keys if whole else model.head_dim,)
    if features.sinks:
        shapes["self_attn.sinks"] = (model.heads,)
    if isinstance(layer.mlp, MlpConfig):
        bias, kind = layer.mlp.mlp_bias, layer.mlp.kind
        return shapes | _mlp("mlp", hidden, model.intermediate_size, bias, bias and adds_bias, gated=kind == "gated")
    return shapes | _experts(hidden, layer.mlp, adds_bias=adds_bias)


def active_parameters(model: ModelConfig, layer: LayerConfig) -> int:
    """Return the number of parameters of ``layer`` that compute a token: those of the chosen experts, not of all."""
    if isinstance(layer.mlp, ExpertsConfig):
        held = range(-(-len(layer.mlp.local) * layer.mlp.chosen // layer.mlp.count))
        layer = replace(layer, mlp=replace(layer.mlp, held=held))
    return sum(math.prod(shape) for shape in layer_shapes(model, layer).values())


def norm_names(layer: LayerConfig) -> list[str]:
    """Return the names of the weights of the norms of ``layer``."""
    return [f"{name}.weight" for name in NORMS[layer.norm_placement]]


def _experts(hidden: int, experts: ExpertsConfig, *, adds_bias: bool) -> dict[str, Shape]:
    shapes = _linear("mlp.gate", experts.count, hidden, experts.router.bias)
    if experts.router.correction_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
    bias = experts.expert_bias
    adds_bias = adds_bias or experts.held is not None  # a rank with whole experts adds their biases
    for index in experts.local:
        shapes |= _mlp(f"mlp.experts.{index}", hidden, experts.width, bias, bias and adds_bias)
    if experts.shared_width:
        shapes |= _mlp("mlp.shared_experts", hidden, experts.shared_width, False, False)
    if experts.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mlp(prefix: str, hidden: int, width: int, bias: bool, down_bias: bool, *, gated: bool = True) -> dict[str, Shape]:
    shapes = _linear(f"{prefix}.gate_proj", width, hidden, bias) if gated else {}
    shapes |= _linear(f"{prefix}.up_proj", width, hidden, bias)
    return shapes | _linear(f"{prefix}.down_proj", hidden, width, down_bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes
