"""``POST /v1/completions``."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from fastapi import Response

from services.common.text.vocabulary import TokenIds
from services.gateway.engine.request import PromptRequest
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.compiler import COMPLETION_TOKENS, RequestCompiler
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.logprobs import names_of_tokens
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import Router
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.shapes import CompletionShape

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_INLINE_PROMPTS = 256  # maximum number of prompts that are compiled on the event loop, in about 3 ms

router = Router()


@router.answer("/v1/completions", CompletionBody, streams=True, in_batch=True)
async def create_completion(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Continue one prompt or several."""
    body = await parse_large(gateway.text, posted, CompletionBody)
    compiler = await RequestCompiler.of(gateway, body, len(body.prompt))
    draft = await compiler.draft(body, caller, default_tokens=COMPLETION_TOKENS)
    prompts: Sequence[TokenIds] = (
        body.prompt
        if not _are_texts(body.prompt)
        else await compiler.encode(draft, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    )
    seed = caller.retry_seed if body.seed is None else body.seed
    make = partial(compiler.prompt_requests, draft, prompts, caller.request_id, field="prompt", seed=seed)
    requests = make() if len(prompts) <= _INLINE_PROMPTS else await gateway.text.in_thread(make)
    shape = CompletionShape(
        caller.request_id,
        compiler.facts,
        names_of_tokens(gateway.text, body)
        if body.logprobs is not None and not draft.settings.packed_logprobs
        else None,
        include_usage=body.wants_usage,
        running_usage=body.wants_running_usage,
    )
    answer = Answer(
        gateway,
        requests,
        shape,
        ignored_header(body),
        caller,
        echo=_echo(gateway, body, requests) if body.echo else (),
        best=(body.n or 1) if body.best_of else None,
    )
    return await answer.respond(stream=bool(body.stream))


def _are_texts(prompts: list[str] | list[np.ndarray]) -> "TypeIs[list[str]]":
    return isinstance(prompts[0], str)


def _echo(gateway: Gateway, body: CompletionBody, requests: Sequence[PromptRequest]) -> list[str]:
    """Return the text of each prompt: decoded from its tokens if it is token ids or truncated, else as given."""
    if _are_texts(body.prompt) and body.truncate_prompt_tokens is None:
        return body.prompt
    vocabulary = gateway.text.vocabulary
    if body.skip_special_tokens is False:
        vocabulary = vocabulary.with_specials
    return [vocabulary.text_bytes(request.prompt_ids).decode(errors="replace") for request in requests]
