"""``POST /v1/chat/completions``."""

import secrets
import time

from fastapi import Request, Response

from services.gateway.gateway import Gateway
from services.gateway.http import Caller, read_body, read_caller, while_connected
from services.gateway.openai.answer import Answer
from services.gateway.openai.jobs import check_choices, make_jobs, make_settings
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.shapes import ChatShape


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    started_at = time.perf_counter()
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    return await while_connected(request.receive, _chat(gateway, raw, read_caller(request), started_at))


async def _chat(gateway: Gateway, raw: bytes, caller: Caller, started_at: float) -> Response:
    body = await parse_large(gateway.text, raw, ChatBody)
    check_choices(1, body, gateway.config.max_choices)
    facts = await gateway.fleet.model(body.model)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    settings = make_settings(body, facts, top_logprobs, "top_logprobs", caller)
    prompt = await gateway.text.encode_chat(
        [message.render() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        max_tokens=facts.max_context_tokens,
    )
    request_id = f"chatcmpl-{secrets.token_hex(16)}"
    jobs = make_jobs(
        request_id,
        [prompt],
        settings,
        facts,
        field="messages",
        max_tokens=body.most_tokens,
        seed=body.seed,
    )
    shape = ChatShape(
        request_id,
        facts,
        gateway.text.token_text if settings.logprobs else None,
        include_usage=body.wants_usage,
    )
    answer = Answer(gateway, jobs, shape, ignored_header(body), started_at)
    return await answer.respond(stream=bool(body.stream))
