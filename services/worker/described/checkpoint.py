"""The tensors of a checkpoint, by what ``config.json`` says. No torch here."""

from services.worker.described.config import ModelConfig

# Older checkpoints carry the rotation's frequencies, which follow from the config.
DERIVED = ("rotary_emb.inv_freq",)


def checkpoint_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Each tensor that a checkpoint of ``model`` has."""
    vocabulary = (model.vocab_size, model.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = vocabulary
    shapes["model.norm.weight"] = (model.hidden_size,)
    of_layer = layer_shapes(model)
    for index in range(model.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def layer_shapes(model: ModelConfig, *, adds_bias: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer. ``adds_bias``: those whose sum is over ranks have a bias here."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, outputs, inputs, bias in (
        ("self_attn.q_proj", queries, hidden, model.qkv_bias),
        ("self_attn.k_proj", keys, hidden, model.qkv_bias),
        ("self_attn.v_proj", keys, hidden, model.qkv_bias),
        ("self_attn.o_proj", hidden, queries, model.output_bias and adds_bias),
        ("mlp.gate_proj", inner, hidden, model.mlp_bias),
        ("mlp.up_proj", inner, hidden, model.mlp_bias),
        ("mlp.down_proj", hidden, inner, model.mlp_bias and adds_bias),
    ):
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    if model.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (model.head_dim,) for name in "qk"}
    return shapes
