"""Parameters that OpenAI (or a well-known engine) knows and this gateway does not honour yet.

One of them with its neutral value changes nothing and passes; with any other it is refused by name, never ignored.
"""

from collections.abc import Container
from typing import Any

from services.common.errors import InvalidRequest

# These stay refused, for the reason given.
NEVER = {
    "chat_template": (
        "chat_template is code, and this server runs none that comes with a request; leave it out, or put the template"
        " into the model's directory as chat_template.jinja"
    ),
}

# What one endpoint has, the other refuses too: a client that sends it counts on it.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "no_repeat_ngram_size": (0,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_regex": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),  # of completions, whose ``logprobs`` is that number
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
} | dict.fromkeys(NEVER, ())

# They concern OpenAI's own bookkeeping and change no answer.
HARMLESS = frozenset({"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"})


def refuse_unsupported(body: dict[str, Any], supported: Container[str]) -> None:
    """Raise ``InvalidRequest`` for the first parameter in ``body`` that asks for something not supported."""
    for name in UNSUPPORTED.keys() & body.keys():
        value, neutrals = body[name], UNSUPPORTED[name]
        if name not in supported and value is not None and not any(_same(value, neutral) for neutral in neutrals):
            if name in NEVER:
                raise InvalidRequest(NEVER[name], field=name, reason="UNSUPPORTED_PARAMETER")
            neutral = "".join(f" or set it to {choice!r}" for choice in neutrals[:1])
            raise InvalidRequest(
                f"the parameter {name!r} is not supported by this server yet; leave it out{neutral}",
                field=name,
                reason="UNSUPPORTED_PARAMETER",
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not only because True == 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
