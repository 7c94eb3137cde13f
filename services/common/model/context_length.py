"""Computes the longest context that a model's ``config.json`` allows."""

from collections.abc import Mapping
from typing import Any

from services.common.model.json_object import JsonObject

# The default of ``max_position_embeddings`` in transformers, and those of model types with another one.
_DEFAULT = 2048
_DEFAULTS = {
    **dict.fromkeys(("gemma3_text", "glm4_moe", "gpt_oss", "mistral", "mixtral"), 131072),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "smollm3"), 32768),
    "gemma2": 8192,
    "phi3": 4096,
}
_MAX_POSITIONS = "max_position_embeddings"
# Names of the same number in older architectures.
_OTHER_KEYS = ("n_positions", "n_ctx", "max_seq_len", "seq_length")
MOST_TOKENS = 1 << 26  # limit of a context; the longest published one has 10 million tokens
_MOST_FACTOR = 1e6


def max_positions(config: Mapping[str, Any]) -> int:
    """Return ``max_position_embeddings``, a number of tokens, or the number under the key of an older architecture.

    Raises ``InvalidRequest`` if it is invalid.
    """
    key = next((key for key in (_MAX_POSITIONS, *_OTHER_KEYS) if config.get(key) is not None), _MAX_POSITIONS)
    given = JsonObject("config.json", config)
    return given.integer(key, _DEFAULTS.get(given.text("model_type"), _DEFAULT), most=MOST_TOKENS)


def rope_parameters(config: Mapping[str, Any]) -> JsonObject:
    """Return the settings of the rotary embedding.

    They are ``rope_parameters`` of transformers 5, or the older ``rope_scaling``, and always contain ``rope_type`` and
    ``original_max_position_embeddings``. As in transformers, ``rope_scaling`` overrides ``rope_parameters``, an
    ``original_max_position_embeddings`` beside the settings overrides the one among them, and
    ``max_position_embeddings`` is the default of both. If each type of layer has its own settings, they are those of
    ``full_attention``. Raises ``InvalidRequest`` for values of a wrong type or size.
    """
    whole = JsonObject("config.json", config)
    name = "rope_scaling" if whole.object("rope_scaling").values else "rope_parameters"
    found = whole.object(name)
    if found.object("full_attention").values:
        found = found.object("full_attention")
    original = "original_max_position_embeddings"
    lengths = (each.integer_or_none(original, most=MOST_TOKENS) for each in (whole, found))
    added = {
        "rope_type": found.text("rope_type") or found.text("type") or "default",
        original: next((length for length in lengths if length is not None), max_positions(config)),
    }
    return JsonObject("config.json", {**found.values, **added}, f"{name}.")


def rope_factor(settings: JsonObject) -> float | None:
    """Return the ``factor`` of ``rope_parameters``, or None if it is absent. Raises ``InvalidRequest``."""
    return settings.number_or_none("factor", least=1e-3, most=_MOST_FACTOR)


def context_length(config: Mapping[str, Any]) -> int:
    """Return the longest context of a model, prompt and answer together, in tokens.

    It is ``max_position_embeddings``, multiplied by the factor for scaling of type ``dynamic``, and if necessary for
    ``yarn``. Configs with another type of scaling state the length after scaling. Raises ``InvalidRequest`` for values
    of a wrong type or size.
    """
    length = max_positions(config)
    settings = rope_parameters(config)
    kind, factor = settings.values["rope_type"], rope_factor(settings) or 1.0
    if kind == "dynamic":
        length = int(length * factor)
    if kind == "yarn":
        length = max(length, int(settings.values["original_max_position_embeddings"] * factor))
    if not 1 <= length <= MOST_TOKENS:
        raise settings.wrong("factor", f"a factor with which the context has 1 to {MOST_TOKENS:,} tokens")
    return length
