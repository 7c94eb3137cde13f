"""Converts the fields of a GGUF file to what ``config.json`` and ``generation_config.json`` would contain."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.common.errors import InvalidRequest
from services.common.model.context_length import MOST_TOKENS
from services.common.model.gguf_file import GgufFile
from services.common.model.json_object import MOST_VOCABULARY, JsonObject

_ARCHITECTURE = "general.architecture"
_MOST_LAYERS, _MOST_WIDTH, _MOST_FACTORS = 4096, 1 << 20, 4096
_MOST = 1e12  # largest number of a setting
_TOKENS = "tokenizer.ggml.tokens"
_EMBEDDING = "token_embd.weight"
_END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end an answer, also if no field names them, as in llama.cpp.
_ENDS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
_CONTROL = 3  # a value of tokenizer.ggml.token_type
_SCALING = frozenset({"type", "factor", "original_context_length", "finetuned", "attn_factor"})
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
# Sampling parameters in ``generation_config.json``, by their fields.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Layers of the largest Gemma 2 and 3. Their scale of attention follows from the width, and no field has it.
_GEMMA_27B_LAYERS = (46, 62)


class _Architecture(NamedTuple):
    """An architecture of GGUF files: its names in ``config.json``, and the keys that only it has."""

    name: str  # of ``architectures``
    model_type: str
    keys: "Callable[[_Fields], dict[str, Any]]" = lambda fields: {}


class _Fields:
    """The fields of an architecture, which begin with its name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.given, self._prefix = file, file.given, f"{architecture}."

    def has(self, name: str) -> bool:
        """Return whether the field exists."""
        return self._prefix + name in self.file.fields

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST_WIDTH) -> int:
        """Return an integer. Some files have one for each layer, which must be equal."""
        key = self._prefix + name
        value = self.file.fields.get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            return JsonObject(str(self.file.path), {key: value[0]}).integer(key, default, least=least, most=most)
        if isinstance(value, list):
            raise self.given.wrong(key, "one integer: layers of different sizes cannot be served")
        return self.given.integer(key, default, least=least, most=most)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        return self.given.number(self._prefix + name, default, most=_MOST)

    def number_or_none(self, name: str) -> float | None:
        """Return a finite number, or None if it is absent."""
        return self.given.number_or_none(self._prefix + name, most=_MOST)

    def text(self, name: str) -> str:
        """Return a string, empty if it is absent."""
        return self.given.text(self._prefix + name)

    def names(self, start: str) -> list[str]:
        """Return the fields that begin with ``start``, without it."""
        start = self._prefix + start
        return [name.removeprefix(start) for name in self.file.fields if name.startswith(start)]


def _llama(fields: _Fields) -> dict[str, Any]:
    tensors = fields.file.tensors
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if not fields.integer("expert_count", 0, least=0):
        return biases
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_expert_counts(fields, "local_experts")}


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    width = {"moe_intermediate_size": fields.integer("expert_feed_forward_length")}
    return width | _expert_counts(fields, "experts") | {"norm_topk_prob": True}


def _expert_counts(fields: _Fields, name: str) -> dict[str, Any]:
    return {
        f"num_{name}": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }


def _gemma(fields: _Fields) -> dict[str, Any]:
    heads, width = fields.integer("attention.head_count"), fields.integer("embedding_length")
    large = fields.integer("block_count", most=_MOST_LAYERS) in _GEMMA_27B_LAYERS
    return {
        "query_pre_attn_scalar": width / heads if large else fields.integer("attention.key_length", 256),
        "sliding_window": fields.integer("attention.sliding_window", 4096, most=MOST_TOKENS),
    }


def _gemma2(fields: _Fields) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }
    return _gemma(fields) | caps


def _gemma3(fields: _Fields) -> dict[str, Any]:
    return _gemma(fields) | {"rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0)}


def _phi3(fields: _Fields) -> dict[str, Any]:
    rotated = fields.integer("rope.dimension_count", 0) or _head_dim(fields)
    found: dict[str, Any] = {"partial_rotary_factor": rotated / _head_dim(fields)}
    if fields.has("attention.sliding_window"):
        found["sliding_window"] = fields.integer("attention.sliding_window", most=MOST_TOKENS)
    return found


def _granite(fields: _Fields) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.number("attention.scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


# By the value of ``general.architecture``.
_ARCHITECTURES = {
    "gemma2": _Architecture("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "granite": _Architecture("GraniteForCausalLM", "granite", _granite),
    "llama": _Architecture("LlamaForCausalLM", "llama", _llama),
    "olmo2": _Architecture("Olmo2ForCausalLM", "olmo2"),
    "phi3": _Architecture("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "smollm3": _Architecture("SmolLM3ForCausalLM", "smollm3"),
}


def architecture_of(file: GgufFile) -> str:
    """Return ``general.architecture``. Raises ``InvalidRequest`` if it is not supported."""
    name = file.given.text(_ARCHITECTURE)
    if name not in _ARCHITECTURES:
        raise InvalidRequest(
            f"{file.path}: {_ARCHITECTURE}={reprlib.repr(name)} is not supported as a GGUF file; choose a model of"
            f" {', '.join(_ARCHITECTURES)}, or the safetensors files of this model",
            field="model",
        )
    parts = file.given.integer("split.count", 1, least=0, most=1 << 16)
    if parts > 1:
        raise InvalidRequest(
            f"{file.path} is one of {parts} parts of a model; join them with llama-gguf-split --merge", field="model"
        )
    return name


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return what ``config.json`` of the model would contain.

    Raises ``InvalidRequest``, which names the field, for an architecture that is not supported, and for a field that is
    missing or of a wrong type or size.
    """
    architecture = architecture_of(file)
    described, fields = _ARCHITECTURES[architecture], _Fields(file, architecture)
    heads = fields.integer("attention.head_count")
    config = {
        "architectures": [described.name],
        "model_type": described.model_type,
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": fields.integer("context_length", most=MOST_TOKENS),
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count", most=_MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": _head_dim(fields),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _ends(file),
    }
    if (scaling := _scaling(fields)) is not None:
        original = "original_max_position_embeddings"
        config |= {"rope_scaling": scaling, original: scaling.get(original)}  # Phi-3 reads it beside the settings
    return config | described.keys(fields)


def read_gguf_generation(file: GgufFile) -> dict[str, Any]:
    """Return what ``generation_config.json`` of the model would contain."""
    fields: Mapping[str, Any] = file.fields
    found = {name: fields.get(f"general.sampling.{field}") for field, name in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}


def _vocab_size(file: GgufFile) -> int:
    """Return the rows of the embedding, or without it the number of tokens."""
    embedding = file.tensors.get(_EMBEDDING)
    tokens = file.given.texts(_TOKENS) or []
    size = len(tokens) if embedding is None else embedding.shape[0]
    if not 1 <= size <= MOST_VOCABULARY or len(tokens) > size:
        raise InvalidRequest(
            f"{file.path}: {_EMBEDDING} has {size:,} rows, and {_TOKENS} {len(tokens):,} tokens; expected 1 to"
            f" {MOST_VOCABULARY:,}, and no more tokens than rows",
            field="model",
        )
    return size


def _head_dim(fields: _Fields) -> int:
    """Return the elements of a head: by their field, or the width of the model divided by the heads."""
    heads = fields.integer("attention.head_count")
    size = fields.integer("attention.key_length", 0) or fields.integer("embedding_length") // heads
    if fields.integer("attention.value_length", size) != size:
        raise fields.given.wrong(
            f"{fields.file.given.text(_ARCHITECTURE)}.attention.value_length",
            f"{size}, the length of the keys: heads with values of another length cannot be served",
        )
    return size


def _ends(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    given, key = file.given, "tokenizer.ggml.token_type"
    most = MOST_VOCABULARY - 1
    found = [given.integer_or_none(f"tokenizer.ggml.{name}", least=0, most=most) for name in _END_FIELDS]
    ids = {token for token in found if token is not None}
    tokens, kinds = given.texts(_TOKENS) or [], given.integers(key) or []
    ids |= {
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    }
    return sorted(ids)


def _scaling(fields: _Fields) -> dict[str, Any] | None:
    """Return ``rope_scaling``, or None if positions are not scaled."""
    kind = fields.text("rope.scaling.type")
    names = fields.names("rope.scaling.")
    known = _SCALING | (_YARN.keys() if kind == "yarn" else set())
    if unknown := sorted(set(names) - known):
        raise InvalidRequest(
            f"{fields.file.path}: the field rope.scaling.{unknown[0][:80]} is not supported; choose another model",
            field="model",
        )
    context = fields.integer("context_length", most=MOST_TOKENS)
    original = fields.integer("rope.scaling.original_context_length", context, most=MOST_TOKENS)
    short, long, all_lengths = (
        fields.file.floats(f"{name}.weight", _MOST_FACTORS)
        for name in ("rope_factors_short", "rope_factors_long", "rope_freqs")
    )
    if all_lengths is not None:  # Llama 3.1 and later: the factors of its scaling, computed when the file was made
        return _longrope(all_lengths, all_lengths, context, 1.0)
    if short is not None or long is not None:
        factors = short or long or [], long or short or []
        return _longrope(*factors, original, fields.number_or_none("rope.scaling.attn_factor"))
    factor = fields.number_or_none("rope.scaling.factor")
    if kind == "linear" or (not kind and factor not in (None, 0.0, 1.0)):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        settings = {name: fields.number_or_none(f"rope.scaling.{field}") for field, name in _YARN.items()}
        given = {name: value for name, value in settings.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | given
    if kind not in ("", "none", "longrope"):
        raise InvalidRequest(
            f"{fields.file.path}: rope.scaling.type={reprlib.repr(kind)} is not supported; expected none, linear, yarn"
            " or longrope",
            field="model",
        )
    return None


def _longrope(short: list[float], long: list[float], original: int, attention_factor: float | None) -> dict[str, Any]:
    """Return settings that divide each frequency by a factor."""
    found: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    found["original_max_position_embeddings"] = original
    return found if attention_factor is None else found | {"attention_factor": attention_factor}
