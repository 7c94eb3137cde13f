"""Parameters of OpenAI or a well-known engine that this gateway does not support.

A parameter with a neutral value changes nothing and is accepted. With any other value it is rejected, never ignored.
"""

from typing import Any

from services.common.errors import UnsupportedParameter
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
    "plugins": ([],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "response_format": ({"type": "text"},),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
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

# Other engines' names for parameters of this server.
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


def refuse_unsupported(body: dict[str, Any], kind: type[Body]) -> None:
    """Raise ``InvalidRequest`` for the first parameter in ``body`` that ``kind`` does not support."""
    for name, value in body.items():
        if name in kind.model_fields or value is None:
            continue
        other = kind.elsewhere.get(name) or _renamed(name, kind)
        if other is None and name in UNSUPPORTED:
            other = Elsewhere("", UNSUPPORTED[name])
        if other is None or any(_same(value, neutral) for neutral in other.neutrals):
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


def _same(value: Any, neutral: Any) -> bool:
    """Return whether two values are equal. True and 1 are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
