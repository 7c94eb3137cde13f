"""Finds the tensors of a checkpoint, by their names in Hugging Face files, in a GGUF file."""

import re
from typing import Literal, NamedTuple

from services.common.model.broken_file import BrokenFile
from services.common.model.gguf_config import architecture_of, read_gguf_config
from services.common.model.gguf_file import GgufFile, GgufTensor

# Factors of the rotation, which are settings.
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = re.compile(r"blk\.([0-9]{1,5})\.([a-z0-9_]+)\.(weight|bias)")
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_AFTER_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = _AFTER_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
# Modules of architectures that differ from ``_MODULES``.
_OTHER_MODULES = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": _AFTER_NORMS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
# Tensors with the weights of all experts, and the names of one expert's.
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {"mlp.gate": "block_sparse_moe.gate", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MOST_EXPERTS = 4096
_MOST_SOURCES = 1 << 18
# Architectures whose files have the rows of q and k in the order of interleaved rotations.
_INTERLEAVED = frozenset({"llama", "granite", "smollm3"})
# Architectures whose files have 1 added to the weights of norms.
_ADDED_NORMS = frozenset({"gemma2", "gemma3"})


class TensorSource(NamedTuple):
    """The position of a checkpoint's tensor in a GGUF file, and the change that the file made to it."""

    tensor: GgufTensor
    expert: int | None = None  # the tensor is this row of the first dimension
    change: Literal["none", "interleaved", "added"] = "none"  # rows of heads in another order; 1 was added
    heads: int = 0  # of an interleaved tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor of the checkpoint."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


def tensor_sources(file: GgufFile) -> dict[str, TensorSource]:
    """Return the source of each tensor, by the name that safetensors files of the model have for it.

    A tensor without such a name has the one of the file. Raises ``InvalidRequest`` for an architecture that is not
    supported, and if two tensors have the same name.
    """
    architecture = architecture_of(file)
    config = read_gguf_config(file)
    modules = _MODULES | _OTHER_MODULES.get(architecture, {})
    mixtral = config["model_type"] == "mixtral"
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    found: dict[str, TensorSource] = {}
    for tensor in file.tensors.values():
        if tensor.name in _SETTINGS:
            continue
        sources = _sources(tensor, modules, _MIXTRAL if mixtral else {})
        if len(found) + len(sources) > _MOST_SOURCES:
            raise BrokenFile(f"{file.path}: it has more than {_MOST_SOURCES:,} tensors", "choose another file")
        for name, source in sources.items():
            module = name.removesuffix(".weight").removesuffix(".bias")
            rows = next((count for end, count in heads.items() if module.endswith(end)), 0)
            if rows and architecture in _INTERLEAVED:
                if source.shape[0] % (2 * rows):
                    raise BrokenFile(
                        f"{file.path}: {tensor.name} has {source.shape[0]} rows, which are not pairs for {rows} heads",
                        "choose another file",
                    )
                source = source._replace(change="interleaved", heads=rows)
            elif module.endswith("norm") and architecture in _ADDED_NORMS:
                source = source._replace(change="added")
            if name in found:
                raise BrokenFile(f"{file.path}: two tensors are {name}", "choose another file")
            found[name] = source
    return found


def _sources(tensor: GgufTensor, modules: dict[str, str], renamed: dict[str, str]) -> dict[str, TensorSource]:
    """Return the tensors of the checkpoint that ``tensor`` contains. ``renamed`` replaces names of experts."""
    outside, _, kind = tensor.name.rpartition(".")
    if outside in _OUTSIDE and kind == "weight":
        return {f"{_OUTSIDE[outside]}.{kind}": TensorSource(tensor)}
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        return {tensor.name: TensorSource(tensor)}
    layer, module, kind = match.groups()
    if module in _EXPERTS and len(tensor.shape) == 3 and tensor.shape[0] <= _MOST_EXPERTS:
        inside = "block_sparse_moe" if renamed else "mlp"
        name = renamed.get(_EXPERTS[module], _EXPERTS[module])
        return {
            f"model.layers.{layer}.{inside}.experts.{expert}.{name}.{kind}": TensorSource(tensor, expert)
            for expert in range(tensor.shape[0])
        }
    if module not in modules:
        return {tensor.name: TensorSource(tensor)}
    return {f"model.layers.{layer}.{renamed.get(modules[module], modules[module])}.{kind}": TensorSource(tensor)}
