"""``POST /v1/chat/completions``."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fastapi import Request, Response

from services.common.json_scan import Raw
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.http.request import Caller, read_body, read_caller, while_connected
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat_shape import ChatShape, MakeReader
from services.gateway.openai.chat_storing import ChatKeeper, StoredChatShape
from services.gateway.openai.conversation import check_tools, continued, make_grammar, make_reader
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.grammar.wanted import wanted_grammar
from services.gateway.openai.jobs import (
    check_choices,
    check_grammar_copies,
    check_max_tokens,
    check_prompts,
    cut,
    default_max_tokens,
    kept_tokens,
    make_jobs,
    make_settings,
)
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.thinking import limit_thinking
from services.gateway.openai.truncation import render_prompt


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    started_at = time.perf_counter()
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    return await while_connected(request.receive, _chat(gateway, raw, read_caller(request, raw), started_at))


class Asked(NamedTuple):
    """A conversation on its way to an answer."""

    request_id: str
    facts: ModelFacts
    settings: Settings
    jobs: list[PromptRequest]
    make_reader: MakeReader
    unknown: list[str]  # parameters that the model's template does not know


async def ask(gateway: Gateway, body: ChatBody, caller: Caller, *, drop_oldest: bool = False) -> Asked:
    """Return what ``body`` asks of the schedulers. Raises ``TokaError``.

    ``drop_oldest``: if the conversation leaves no room for the answer, drop its oldest messages.
    """
    check_choices(1, body, gateway.config.max_choices)
    facts = await gateway.fleet.model(body.model)
    max_tokens = check_max_tokens(body, gateway.config.max_output_tokens, default_max_tokens(body, facts))
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    kept = kept_tokens(body, facts, gateway.config.max_prompt_tokens)
    tools = check_tools(gateway.formats, body, body.tool_choice)
    wanted = await wanted_grammar(gateway.text, body)
    max_prompt_tokens = facts.max_context_tokens if kept is None else None
    prompt = await render_prompt(gateway, body, facts, max_prompt_tokens, drop_oldest=drop_oldest)
    parallel = body.parallel_tool_calls is not False
    grammar = await make_grammar(
        gateway.text, gateway.formats, body, prompt, tools, wanted, choice=body.tool_choice, parallel=parallel
    )
    check_grammar_copies(1, body, grammar)
    settings = make_settings(body, facts, top_logprobs, "top_logprobs", caller, grammar)
    thoughts = prompt.thoughts(continued(body))
    settings = limit_thinking(settings, body.thinking_token_budget, gateway.formats, facts, thoughts)
    prompts = [cut(prompt.ids, kept, body.truncation_side)]
    check_prompts(prompts, gateway.config.max_prompt_tokens, "messages")
    jobs = make_jobs(
        caller.request_id,
        prompts,
        settings,
        facts,
        field="messages",
        max_tokens=max_tokens,
        seed=caller.retry_seed if body.seed is None else body.seed,
    )
    reader = partial(make_reader, gateway, body, prompt, tools, parallel=parallel)
    return Asked(caller.request_id, facts, settings, jobs, reader, prompt.unknown)


async def _chat(gateway: Gateway, raw: Raw, caller: Caller, started_at: float) -> Response:
    body = await parse_large(gateway.text, raw, ChatBody)
    make_shape: Callable[..., ChatShape] = ChatShape
    if body.store:
        keeper = await ChatKeeper.of(gateway, body, caller, raw)
        if caller.idempotency_key and not body.stream and (earlier := await keeper.earlier()) is not None:
            return Response(earlier, headers=ignored_header(body), media_type="application/json")
        make_shape = partial(StoredChatShape, keeper)
    asked = await ask(gateway, body, caller)
    shape = make_shape(
        asked.request_id,
        asked.facts,
        gateway.text.token_text if asked.settings.logprobs and not asked.settings.packed_logprobs else None,
        include_usage=body.wants_usage,
        running_usage=body.wants_running_usage,
        make_reader=asked.make_reader,
    )
    answer = Answer(gateway, asked.jobs, shape, ignored_header(body, asked.unknown), started_at, caller)
    return await answer.respond(stream=bool(body.stream))
