"""Parameters that OpenAI (or a well-known engine) knows and this gateway does not honour yet.

One of them with its neutral value changes nothing and passes; with any other it is refused by name, never ignored.
"""

from typing import Any

from services.common.errors import InvalidRequest

_SHARED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
}

COMPLETIONS: dict[str, tuple[Any, ...]] = _SHARED | {
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
}

CHAT: dict[str, tuple[Any, ...]] = _SHARED | {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# They concern OpenAI's own bookkeeping and change no answer.
HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user"}
)


def refuse_unsupported(body: dict[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    """Raise ``InvalidRequest`` for the first parameter in ``body`` that asks for something not supported."""
    for name in known.keys() & body.keys():
        value = body[name]
        if value is not None and not any(_same(value, neutral) for neutral in known[name]):
            neutral = "".join(f" or set it to {choice!r}" for choice in known[name][:1])
            raise InvalidRequest(
                f"the parameter {name!r} is not supported by this server yet; leave it out{neutral}",
                field=name,
                reason="UNSUPPORTED_PARAMETER",
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not only because True == 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
