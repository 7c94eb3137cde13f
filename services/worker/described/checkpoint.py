"""Names and shapes of a checkpoint's tensors, derived from the model config."""

from services.worker.described.config import ModelConfig
from services.worker.described.layer import LayerConfig

# Suffixes of tensors that loading ignores: older checkpoints store rotary frequencies, which the config determines.
DERIVED = ("rotary_emb.inv_freq",)


def checkpoint_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a checkpoint of ``model``, by name."""
    vocabulary = (model.vocab_size, model.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = vocabulary
    shapes["model.norm.weight"] = (model.hidden_size,)
    for index, layer in enumerate(model.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(model, layer).items()}
    return shapes


def layer_shapes(model: ModelConfig, layer: LayerConfig, *, adds_bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in ``layer`` of ``model``, by its name inside the layer.

    With ``adds_bias`` false, ``o_proj`` and ``down_proj`` have no bias. Their outputs are summed over tensor-parallel
    ranks, and only one rank adds the bias.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, outputs, inputs, bias in (
        ("self_attn.q_proj", queries, hidden, layer.attention.qkv_bias),
        ("self_attn.k_proj", keys, hidden, layer.attention.qkv_bias),
        ("self_attn.v_proj", keys, hidden, layer.attention.qkv_bias),
        ("self_attn.o_proj", hidden, queries, layer.attention.output_bias and adds_bias),
        ("mlp.gate_proj", inner, hidden, layer.mlp.mlp_bias),
        ("mlp.up_proj", inner, hidden, layer.mlp.mlp_bias),
        ("mlp.down_proj", hidden, inner, layer.mlp.mlp_bias and adds_bias),
    ):
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    if layer.attention.qk_norm == "per_head":
        shapes |= {f"self_attn.{name}_norm.weight": (model.head_dim,) for name in "qk"}
    return shapes
