"""Reads the defaults of sampling parameters from a model's ``generation_config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.sampling import PARAMETERS

# Parameters that the file can set, named as in the message Sampling, with their values if it does not set them.
_WITHOUT_FILE: dict[str, Any] = {
    name: PARAMETERS[name].default for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
_INTEGERS = frozenset({"top_k"})


@dataclass(frozen=True)
class GenerationDefaults:
    """Values of parameters that a request omits. Never changed, so any thread may use it."""

    sampling: Mapping[str, Any] = field(default_factory=_WITHOUT_FILE.copy)  # by name in the message Sampling
    max_new_tokens: int | None = None  # limit of an answer; None = the rest of the context
    ignored: tuple[str, ...] = ()  # ``name=value`` of unsupported settings that would change answers


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_sampling_value(name: str, value: Any) -> bool:
    """Return whether ``value`` is allowed for the sampling parameter ``name``, as in a request."""
    is_number = _is_integer(value) or (isinstance(value, float) and name not in _INTEGERS)
    return is_number and PARAMETERS[name].allows(value)


# Settings that do not affect a decoder's answers, or that other code reads.
_WITHOUT_EFFECT = frozenset(
    {
        *("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config"),
        *("use_cache", "cache_implementation", "cache_config", "return_dict_in_generate", "output_attentions"),
        *("output_hidden_states", "output_scores", "output_logits", "return_legacy_cache", "disable_compile"),
        *("compile_config", "num_return_sequences", "low_memory", "decoder_start_token_id"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens", "is_assistant"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
        *("assistant_lookbehind", "target_lookbehind", "prefill_chunk_size", "generation_kwargs", "encoder_outputs"),
        # The length of prompt and answer together. transformers writes 20 by default, and few readers apply it.
        "max_length",
    }
)
# The values with which other settings have no effect.
_OFF: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "early_stopping": False,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "guidance_scale": 1.0,
    "top_h": None,
    "penalty_alpha": 0.0,
}
_LONGEST_VALUE = 40  # characters of a value in the log


def read_generation_defaults(content: Mapping[str, Any]) -> GenerationDefaults:
    """Return the defaults in ``content``, a ``generation_config.json``.

    As in transformers, ``do_sample: false`` means greedy sampling, and null means absent. Values that a request must
    not have are listed in ``ignored``.
    """
    sampling: dict[str, Any] = _WITHOUT_FILE.copy()
    max_new_tokens: int | None = None
    ignored = []
    for name, value in content.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in _WITHOUT_FILE and _is_sampling_value(name, value):
            sampling[name] = value
        elif name == "max_new_tokens" and _is_integer(value) and 1 <= value < 2**31:
            max_new_tokens = value
        elif name not in _OFF or value != _OFF[name]:
            text = str(value)
            ignored.append(f"{name}={text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + '...'}")
    if content.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return GenerationDefaults(sampling, max_new_tokens, tuple(ignored))
