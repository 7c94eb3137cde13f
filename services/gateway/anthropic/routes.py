"""The endpoints ``/v1/messages`` and ``/v1/messages/count_tokens``."""

import time

from fastapi import Request, Response

from services.common.errors import TokaError
from services.gateway.anthropic.body import CountTokensBody, MessagesBody
from services.gateway.anthropic.conversation import ModelTraits, shows_late_system
from services.gateway.anthropic.errors import REQUEST_ID_HEADER, in_own_words
from services.gateway.anthropic.shape import MessageShape
from services.gateway.http.errors import response
from services.gateway.http.request import Caller, read_body, read_caller, while_connected
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat import ask
from services.gateway.openai.conversation import render
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.parse import ignored_header, parse_large


async def create_message(request: Request) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    started_at = time.perf_counter()
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    caller = read_caller(request, raw)
    body = await parse_large(gateway.text, raw, MessagesBody)
    try:
        return await while_connected(request.receive, _create(gateway, body, len(raw), caller, started_at))
    except TokaError as error:
        raise in_own_words(error, body.model_fields_set) from None


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a message without running it."""
    gateway: Gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    caller = read_caller(request, raw)
    body = await parse_large(gateway.text, raw, CountTokensBody)
    try:
        return await while_connected(request.receive, _count(gateway, body, len(raw), caller))
    except TokaError as error:
        raise in_own_words(error, body.model_fields_set) from None


async def _create(gateway: Gateway, body: MessagesBody, size: int, caller: Caller, started_at: float) -> Response:
    traits = _traits(gateway, body)
    asked = await ask(gateway, await gateway.text.worked(size, body.chat, traits), caller)
    shape = MessageShape(
        asked.jobs[0],
        asked.facts,
        asked.make_reader,
        max_tokens=body.max_tokens,
        omit_thinking=body.thinking is not None and body.thinking.display == "omitted",
    )
    headers = _headers(body, traits, caller)
    return await Answer(gateway, asked.jobs, shape, headers, started_at, caller).respond(stream=bool(body.stream))


async def _count(gateway: Gateway, body: CountTokensBody, size: int, caller: Caller) -> Response:
    await gateway.fleet.model(body.model)
    traits = _traits(gateway, body)
    chat = await gateway.text.worked(size, body.count, traits)
    prompt = await render(gateway.text, chat, max_tokens=None, with_tools=chat.tool_choice != "none")
    return response(200, {"input_tokens": len(prompt.ids)}, _headers(body, traits, caller))


def _traits(gateway: Gateway, body: CountTokensBody) -> ModelTraits:
    """Return the traits of the model, with the chat template for ``body``. Raises InvalidRequest if it has none."""
    tools = bool(body.tools) and (body.tool_choice is None or body.tool_choice.type != "none")
    template = gateway.text.tokenizer.chat_template(tools=tools)
    formats = gateway.formats
    return ModelTraits(
        template.variables, shows_late_system(template), formats.reasoning, formats.takes_thinking_budgets
    )


def _headers(body: CountTokensBody, traits: ModelTraits, caller: Caller) -> dict[str, str]:
    return ignored_header(body, body.unhonoured(traits)) | {REQUEST_ID_HEADER: caller.request_id}
