"""``POST /v1/completions``."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from fastapi import Response

from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.grammar.wanted import wanted_grammar
from services.gateway.openai.jobs import (
    check_choices,
    check_grammar_copies,
    check_max_tokens,
    check_prompts,
    cut,
    kept_tokens,
    make_jobs,
    make_settings,
)
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import Router
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.shapes import CompletionShape
from services.gateway.openai.thinking import limit_thinking

if TYPE_CHECKING:
    from typing_extensions import TypeIs

DEFAULT_MAX_TOKENS = 16
_INLINE_PROMPTS = 256  # which become jobs on the event loop, in some 3 ms


router = Router()


@router.answer("/v1/completions", CompletionBody, streams=True, in_batch=True)
async def create_completion(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Continue one prompt or several."""
    body = await parse_large(gateway.text, posted, CompletionBody)
    check_choices(len(body.prompt), body, gateway.config.max_choices)
    max_tokens = check_max_tokens(body, gateway.config.max_output_tokens, DEFAULT_MAX_TOKENS)
    facts = await gateway.fleet.model(body.model)
    grammar = await wanted_grammar(gateway.text, body)
    check_grammar_copies(len(body.prompt), body, grammar)
    settings = make_settings(body, facts, body.logprobs, "logprobs", caller, grammar)
    settings = limit_thinking(settings, body.thinking_token_budget, gateway.formats, facts, None)
    prompts = await _token_ids(gateway, body, facts)
    check_prompts(prompts, gateway.config.max_prompt_tokens, "prompt")
    make = partial(
        make_jobs,
        caller.request_id,
        prompts,
        settings,
        facts,
        field="prompt",
        max_tokens=max_tokens,
        seed=caller.retry_seed if body.seed is None else body.seed,
    )
    jobs = make() if len(prompts) <= _INLINE_PROMPTS else await gateway.text.in_thread(make)
    shape = CompletionShape(
        caller.request_id,
        facts,
        gateway.text.token_text if body.logprobs is not None and not settings.packed_logprobs else None,
        include_usage=body.wants_usage,
        running_usage=body.wants_running_usage,
    )
    answer = Answer(
        gateway,
        jobs,
        shape,
        ignored_header(body),
        caller,
        echo=_echo(gateway, body, prompts) if body.echo else (),
        best=(body.n or 1) if body.best_of else None,
    )
    return await answer.respond(stream=bool(body.stream))


async def _token_ids(gateway: Gateway, body: CompletionBody, facts: ModelFacts) -> Sequence[TokenIds]:
    """Return the token ids of each prompt, cut to ``truncate_prompt_tokens``."""
    kept = kept_tokens(body, facts, gateway.config.max_prompt_tokens)
    if _are_texts(body.prompt):
        prompts: Sequence[TokenIds] = await gateway.text.encode(
            body.prompt,
            max_tokens=facts.max_context_tokens if kept is None else None,
            field="prompt",
            add_special_tokens=body.add_special_tokens is not False,
        )
    else:
        prompts = body.prompt
    return prompts if kept is None else [cut(prompt, kept, body.truncation_side) for prompt in prompts]


def _are_texts(prompts: list[str] | list[np.ndarray]) -> "TypeIs[list[str]]":
    return isinstance(prompts[0], str)


def _echo(gateway: Gateway, body: CompletionBody, prompts: Sequence[TokenIds]) -> list[str]:
    """The text of each prompt: as it was given, unless it was given as token ids or is cut."""
    if _are_texts(body.prompt) and body.truncate_prompt_tokens is None:
        return body.prompt
    vocabulary = gateway.text.vocabulary
    if body.skip_special_tokens is False:
        vocabulary = vocabulary.with_specials
    return [vocabulary.text_bytes(prompt).decode(errors="replace") for prompt in prompts]
