"""Models without a description in the registry, which transformers computes (``model_impl=transformers``).

Only the worker loads transformers. The sizes here are estimates for other programs. The worker replaces them by those
of the loaded model.
"""

import importlib.util
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.model.context_length import context_length
from services.common.model.files import read_config
from services.common.model.gguf_config import read_gguf_config
from services.common.model.gguf_file import is_gguf, read_gguf
from services.common.model.json_object import MOST_VOCABULARY, JsonObject
from services.common.model.quantized.gguf import gguf_quantization
from services.worker.described.config import ModelConfig, read_size
from services.worker.described.layer import LLAMA_LAYER, ExpertsConfig
from services.worker.described.registry import ARCHITECTURES, architecture_names, read_model_config

_INSTALL = "pip install 'tokasaurus[worker-transformers]'"
# The keys of ``config.json`` under which architectures have a size. The first is that of Llama.
_KEYS = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "num_experts_per_token"),
    "moe_intermediate_size": ("expert_dim",),
}
# Elements of a head whose keys and values are projected from a smaller vector (DeepSeek-AI 2024).
_LATENT_KEYS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_HEADS = ("ForCausalLM", "LMHeadModel", "GenerationDecoder")
_NO_HEAD = "the name of a language model ends with ForCausalLM or LMHeadModel"
# Values of ``layer_types`` for layers that have keys and values of each token. Chunks that are as long as the context
# are full attention, and the worker refuses others.
_ATTENTION_TYPES = ("full_attention", "sliding_attention", "attention", "chunked_attention")
# Values of ``layer_types`` for layers without attention.
_OTHER_TYPES = ("mlp", "moe")
# Architectures whose layers keep a state instead of keys and values, by the beginning of their names.
_STATEFUL = (
    *("BailingHybrid", "Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "Jamba", "KimiLinear", "Lfm2", "Lfm3"),
    *("Mamba", "MiniMaxForCausalLM", "NemotronH", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "RecurrentGemma", "Rwkv"),
    *("Zamba", "xLSTM"),
)
# Architectures with attention of their own, which is not a softmax of products of queries and keys.
_OWN_ATTENTION = ("CpmAnt", "Reformer", "XLMWithLMHeadModel", "XLNet")
_TOWERS = ("vision_config", "audio_config", "vq_config", "image_config", "speech_config")


def read_described(path: Path, config: WorkerConfig) -> tuple[Mapping[str, Any], ModelConfig, str]:
    """Return the content of ``config.json``, the description of the model, and the reason for its implementation.

    ``path`` is a directory or a GGUF file, whose native description also says how its blocks are quantized. Raises
    ``InvalidRequest``.
    """
    file = read_gguf(path) if is_gguf(path) else None
    raw = read_config(path) if file is None else read_gguf_config(file)
    described, reason = choose_implementation(raw, config)
    if file is not None and described.foreign is None:
        described = replace(described, quantization=gguf_quantization(file))
    return raw, described, reason


def choose_implementation(raw: Mapping[str, Any], config: WorkerConfig) -> tuple[ModelConfig, str]:
    """Return the description of the model of ``config.json``, and the reason for its implementation, for the log.

    ``config`` has the flag ``model_impl``, and flags that do not work with transformers. Raises ``InvalidRequest``,
    with the key or flag and the fix, if the model cannot run.
    """
    names = architecture_names(raw)
    native = next((name for name in names if name in ARCHITECTURES), None)
    if config.model_impl == "native":
        return read_model_config(raw), "model_impl=native asks for it"
    reason = "model_impl=transformers asks for it"
    if config.model_impl == "auto" and native is not None:
        try:
            return read_model_config(raw), f"{native} has a native implementation"
        except InvalidRequest as error:
            reason = f"the native implementation of {native} declines: {error.message}"
            try:
                return _foreign(raw, names, config), reason
            except InvalidRequest:
                raise error from None
    if config.model_impl == "auto":
        reason = f"{names[0] if names else 'the architecture'} has no native implementation"
    return _foreign(raw, names, config), reason


def _foreign(raw: Mapping[str, Any], names: list[str], config: WorkerConfig) -> ModelConfig:
    name = _refuse_architecture(raw, names)
    _refuse_settings(raw, name)
    _refuse_flags(config, name)
    return read_foreign(raw, name)


def refuse_missing_library(name: str) -> None:
    """Raise ``InvalidRequest`` if transformers is not installed, through which the architecture ``name`` runs."""
    if importlib.util.find_spec("transformers") is None:
        raise InvalidRequest(
            f"config.json: {name} runs through the transformers library only, which is not installed; {_INSTALL}",
            field="model",
        )


def read_foreign(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """Return an estimate of the sizes of a model of the architecture ``name``. Raises ``InvalidRequest``."""
    given = JsonObject("config.json", _renamed(raw))
    heads, hidden = read_size(given, "num_attention_heads"), read_size(given, "hidden_size")
    inner = read_size(given, "intermediate_size", 4 * hidden)
    experts = read_size(given, "num_experts", 1)
    layer = LLAMA_LAYER
    if experts > 1:
        chosen = min(experts, read_size(given, "num_experts_per_tok", 2))
        width = read_size(given, "moe_intermediate_size", inner)
        layer = replace(layer, mlp=ExpertsConfig(experts, chosen, width))
    kv_heads, head_dim = read_size(given, "num_key_value_heads", heads), max(1, hidden // heads)
    if given.values.get("kv_lora_rank") is not None:  # keys and values are cached after their projections
        rotated, others, values = (given.integer(key, head_dim, least=0, most=head_dim * 64) for key in _LATENT_KEYS)
        kv_heads, head_dim = heads, max(rotated + others, values)
    else:
        head_dim = read_size(given, "head_dim", head_dim)
    return ModelConfig(
        vocab_size=given.integer("vocab_size", most=MOST_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=inner,
        layers=(layer,) * read_size(given, "num_hidden_layers"),
        heads=heads,
        kv_heads=min(heads, kv_heads),
        head_dim=head_dim,
        norm_eps=0.0,
        max_context_tokens=context_length(raw),
        ropes=(),
        tied_embeddings=given.values.get("tie_word_embeddings") is not False,
        foreign=name,
    )


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``config.json`` with sizes under the keys of Llama."""
    values = dict(raw)
    for key, others in _KEYS.items():
        found = next((raw[each] for each in (key, *others) if raw.get(each) is not None), None)
        if found is not None:
            # Some architectures list a size for each layer.
            values[key] = found[0] if isinstance(found, list) and found else found
    return values


def _refuse_architecture(raw: Mapping[str, Any], names: list[str]) -> str:
    """Return the name of the architecture. Raises ``InvalidRequest`` if transformers cannot run it for the worker."""
    if not names:
        raise InvalidRequest("config.json: architectures is missing; fetch the file again", field="model")
    name = names[0]
    towers = [key for key in _TOWERS if raw.get(key) is not None]
    if raw.get("auto_map") is not None:
        raise _refused(name, "auto_map asks for code from the model's directory, which is never run")
    if raw.get("is_encoder_decoder") is True:
        raise _refused(name, "it has an encoder (is_encoder_decoder)")
    if towers:
        raise _refused(name, f"it has a tower for other inputs than text ({towers[0]})")
    if not name.endswith(_HEADS):
        raise _refused(name, _NO_HEAD)
    if name.startswith(_STATEFUL):
        raise _refused(name, "it has state-space, recurrent, convolution or linear-attention layers")
    if name.startswith(_OWN_ATTENTION):
        raise _refused(name, "its attention is not a softmax of the products of queries and keys")
    return name


def refuse_layer_types(kinds: Iterable[str], name: str) -> None:
    """Raise ``InvalidRequest`` if layers of one of the types ``kinds`` cannot run."""
    if others := sorted(set(kinds) - {*_ATTENTION_TYPES, *_OTHER_TYPES}):
        raise _refused(name, f"its layer_types contain {reprlib.repr(others[0])}")


def _refuse_settings(raw: Mapping[str, Any], name: str) -> None:
    given = JsonObject("config.json", raw)
    if isinstance(raw.get("layer_types"), list):
        refuse_layer_types(given.texts("layer_types") or (), name)
    if raw.get("alibi") is True or raw.get("position_embedding_type") == "alibi":
        raise _refused(name, "its attention adds a bias by distance (ALiBi)")
    if raw.get("quantization_config") is not None:
        raise _refused(name, "its weights are quantized (quantization_config)")


def _refuse_flags(config: WorkerConfig, name: str) -> None:
    for flag, supported in (("tp_size", 1), ("pp_size", 1), ("quantization", "none")):
        value = getattr(config, flag)
        if value not in (supported, "auto"):
            raise InvalidRequest(
                f"flag {flag}={value}: {name} runs through transformers, which supports {flag}={supported} only;"
                f" use {flag}={supported}, or a model of {', '.join(ARCHITECTURES)}",
                field=flag,
            )


def _refused(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"config.json: {name} cannot run through transformers (model_impl): {reason}; choose a model of"
        f" {', '.join(ARCHITECTURES)}, or another decoder-only one",
        field="model",
    )
