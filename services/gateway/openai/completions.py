"""``POST /v1/completions``."""

import secrets
import time

from fastapi import Request, Response

from services.gateway.gateway import Gateway
from services.gateway.http import Caller, read_body, read_caller, while_connected
from services.gateway.openai.answer import Answer
from services.gateway.openai.jobs import check_choices, make_jobs, make_settings
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.shapes import CompletionShape

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    started_at = time.perf_counter()
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    return await while_connected(request.receive, _complete(gateway, raw, read_caller(request), started_at))


async def _complete(gateway: Gateway, raw: bytes, caller: Caller, started_at: float) -> Response:
    body = await parse_large(gateway.text, raw, CompletionBody)
    check_choices(len(body.prompt), body, gateway.config.max_choices)
    facts = await gateway.fleet.model(body.model)
    settings = make_settings(body, facts, body.logprobs, "logprobs", caller)
    prompts = body.prompt
    if isinstance(prompts[0], str):
        prompts = await gateway.text.encode(prompts, max_tokens=facts.max_context_tokens, field="prompt")
    request_id = f"cmpl-{secrets.token_hex(16)}"
    jobs = make_jobs(
        request_id,
        prompts,
        settings,
        facts,
        field="prompt",
        max_tokens=body.most_tokens or DEFAULT_MAX_TOKENS,
        seed=body.seed,
    )
    shape = CompletionShape(
        request_id,
        facts,
        gateway.text.token_text if settings.logprobs else None,
        include_usage=body.wants_usage,
    )
    answer = Answer(gateway, jobs, shape, ignored_header(body), started_at)
    return await answer.respond(stream=bool(body.stream))
