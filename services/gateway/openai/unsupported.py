"""Parameters of OpenAI or a well-known engine that this gateway does not support.

A parameter with a neutral value changes nothing and is accepted. With any other value it is rejected, never ignored.
Other engines' names of this server's parameters are accepted if they have the same meaning and the same values. A name
with a similar meaning is rejected, and the error says which parameter to send instead.
"""

from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidValue, UnsupportedParameter
from services.gateway.openai.body import Body, Elsewhere

# Parameters that will not be supported, with the error message.
NEVER = {
    "chat_template": (
        "chat_template is code, and this server runs no code of a request; leave it out, or put the template into the"
        " model's directory as chat_template.jinja"
    ),
}

# Neutral values by parameter. An endpoint also rejects parameters of other endpoints: a client that sends one relies on
# it.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "adapter_id": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "documents": ([],),
    "echo": (False,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "ebnf": (),
    "enable_search": (False,),
    "end_stragglers_after": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "models": ([],),
    "moderation": (),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "parallel_tool_calls": (True, False),
    "park_stragglers_after": (),
    "plugins": ([],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "response_format": ({"type": "text"},),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_prompt_start": (0,),
    "return_tokens_as_token_ids": (False,),
    "safe_prompt": (False,),
    "samplers": ([],),
    "search_parameters": (),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "session_params": ({},),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tfs_z": (1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),  # of completions, whose ``logprobs`` is that number
    "transforms": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
} | dict.fromkeys(NEVER, ())

# Names with the same meaning and values, of SGLang, llama.cpp, Hugging Face and Mistral.
SAME = {
    "ebnf": "guided_grammar",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "regex": "guided_regex",
    "routed_experts_start_len": "routed_experts_prompt_start",
    "stop_sequences": "stop",
    "truncate": "truncate_prompt_tokens",
}
# With a name of the original Tokasaurus.
SAME_IN_CHAT = {**SAME, "apply_chat_template_overrides": "chat_template_kwargs"}

_ITS_MEMBERS = Elsewhere("its members as parameters", ({},))
_LOGPROBS, _LENGTH = "logprobs", "max_tokens"
SIMILAR = {
    "decoder_input_details": Elsewhere("prompt_logprobs", (False,)),
    "details": Elsewhere(_LOGPROBS, (False,)),
    "do_sample": Elsewhere("temperature=0 for the most likely tokens", (True,)),
    "format": Elsewhere("response_format"),
    "input_ids": Elsewhere("prompt with token ids"),
    "inputs": Elsewhere("prompt"),
    "max_length": Elsewhere(_LENGTH),
    "max_output_tokens": Elsewhere(_LENGTH),
    "n_predict": Elsewhere(_LENGTH, (-1,)),
    "n_probs": Elsewhere(_LOGPROBS, (0,)),
    "num_predict": Elsewhere(_LENGTH, (-1,)),
    "num_return_sequences": Elsewhere("n", (1,)),
    "options": _ITS_MEMBERS,
    "parameters": _ITS_MEMBERS,
    "repeat_penalty": Elsewhere("repetition_penalty", (1,)),
    "return_full_text": Elsewhere("echo", (False,)),
    "return_logprob": Elsewhere(_LOGPROBS, (False,)),
    "sampling_params": _ITS_MEMBERS,
    "top_logprobs_num": Elsewhere(_LOGPROBS, (0,)),
    "top_n_tokens": Elsewhere(_LOGPROBS, (0,)),
}
SIMILAR_IN_CHAT = {
    **SIMILAR,
    "enable_thinking": Elsewhere("chat_template_kwargs={'enable_thinking': ...}"),
    "input_ids": Elsewhere("messages"),
    "inputs": Elsewhere("messages"),
    "return_full_text": Elsewhere("a completion with echo", (False,)),
    "think": Elsewhere("reasoning_effort"),
    "thinking": Elsewhere("reasoning_effort"),
}

# Other engines' names for parameters that not every endpoint has.
RENAMED = {
    "logprob_start_len": Elsewhere("prompt_logprobs_start", (-1,)),
    "max_reasoning_tokens": Elsewhere("thinking_token_budget"),
    "max_thinking_tokens": Elsewhere("thinking_token_budget"),
    "reasoning_budget": Elsewhere("thinking_token_budget", (-1,)),
    "thinking_budget": Elsewhere("thinking_token_budget", (-1,)),
    "thinking_budget_tokens": Elsewhere("thinking_token_budget", (-1,)),
}

# Unknown parameters that are accepted silently: they are for OpenAI's own services and change no answer.
HARMLESS = frozenset({"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"})


def refused_names(
    length: Elsewhere, form: Elsewhere, prompt: str, own: Mapping[str, Elsewhere]
) -> dict[str, Elsewhere]:
    """Return the names of other engines that an endpoint rejects, with the parameters to send instead.

    ``length``: the parameter that limits an answer. ``form``: the parameter that sets its schema. ``prompt``: name of
    the parameter for the prompt. ``own``: further entries, which take precedence.
    """
    lengths = ("max_length", "max_new_tokens", "n_predict", "num_predict")
    forms = ("ebnf", "format", "grammar", "json_schema", "regex")
    same = {name: Elsewhere(ours) for name, ours in SAME.items()}
    return {
        **SIMILAR_IN_CHAT,
        **same,
        **dict.fromkeys(lengths, length),
        **dict.fromkeys(forms, form),
        **dict.fromkeys(("input_ids", "inputs"), Elsewhere(prompt)),
        **own,
    }


def rename(document: dict[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Replace other engines' names in ``document``. Return the names that were replaced, by this server's name.

    Raises ``InvalidRequest`` if a parameter has different values under two names.
    """
    given: dict[str, str] = {}
    for name in [name for name in names if name in document]:
        value, ours = document.pop(name), names[name]
        if value is None:
            continue
        if document.get(ours) is not None and not same(document[ours], value, name):
            raise InvalidValue(
                f"{name!r} is another name of {given.get(ours, ours)!r}, which has another value; send one of them",
                field=name,
            )
        document[ours] = value
        given[ours] = name
    return given


def refuse_unsupported(body: dict[str, Any], kind: type[Body]) -> None:
    """Raise ``InvalidRequest`` for the first parameter in ``body`` that ``kind`` does not support."""
    for name, value in body.items():
        if name in kind.model_fields or value is None:
            continue
        other = kind.elsewhere.get(name) or _renamed(name, kind)
        if other is None and name in UNSUPPORTED:
            other = Elsewhere("", UNSUPPORTED[name])
        if other is None or any(same(value, neutral, name) for neutral in other.neutrals):
            continue
        raise UnsupportedParameter(_refusal(name, other), field=name)


def _renamed(name: str, kind: type[Body]) -> Elsewhere | None:
    """Return the parameter of ``kind`` that another engine calls ``name``, if it has one."""
    other = RENAMED.get(name)
    return other if other is not None and other.instead in kind.model_fields else None


def _refusal(name: str, other: Elsewhere) -> str:
    if name in NEVER:
        return NEVER[name]
    if other.instead:
        return f"the parameter {name!r} is not one of this endpoint's; send {other.instead} instead"
    neutral = "".join(f" or set it to {choice!r}" for choice in other.neutrals[:1])
    return f"the parameter {name!r} is not supported by this server yet; leave it out{neutral}"


def same(value: Any, other: Any, field: str) -> bool:
    """Return whether two values are equal. True and 1 are not.

    Raises ``InvalidRequest``, which names ``field``, if both are nested too deeply to be compared.
    """
    try:
        return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
    except RecursionError:
        raise InvalidValue.at(field, "it is nested too deeply; make it flatter") from None
