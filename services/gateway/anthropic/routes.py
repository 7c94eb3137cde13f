"""The endpoints ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from fastapi import Response

from services.common.errors import TokaError
from services.gateway.anthropic.body import CountTokensBody, MessagesBody
from services.gateway.anthropic.conversation import ModelTraits, shows_late_system
from services.gateway.anthropic.errors import CREATE, REQUEST_ID_HEADER, in_own_words
from services.gateway.anthropic.shape import MessageShape
from services.gateway.http.errors import response
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat import ask
from services.gateway.openai.conversation import render
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import Router

router = Router()


@router.answer(CREATE, MessagesBody, streams=True)
async def create_message(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    body = await parse_large(gateway.text, posted, MessagesBody)
    try:
        return await _create(gateway, body, posted.bytes, caller)
    except TokaError as error:
        raise in_own_words(error, body.model_fields_set) from None


@router.answer(f"{CREATE}/count_tokens", CountTokensBody)
async def count_tokens(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Count the prompt tokens of a message without running it."""
    body = await parse_large(gateway.text, posted, CountTokensBody)
    try:
        return await _count(gateway, body, posted.bytes, caller)
    except TokaError as error:
        raise in_own_words(error, body.model_fields_set) from None


async def _create(gateway: Gateway, body: MessagesBody, size: int, caller: Caller) -> Response:
    traits = _traits(gateway, body)
    asked = await ask(gateway, await gateway.text.worked(size, body.chat, traits), caller)
    shape = MessageShape(
        asked.prompts[0],
        asked.facts,
        asked.make_reader,
        max_tokens=body.max_tokens,
        omit_thinking=body.thinking is not None and body.thinking.display == "omitted",
    )
    headers = _headers(body, traits, caller)
    return await Answer(gateway, asked.prompts, shape, headers, caller).respond(stream=bool(body.stream))


async def _count(gateway: Gateway, body: CountTokensBody, size: int, caller: Caller) -> Response:
    await gateway.fleet.model(body.model)
    traits = _traits(gateway, body)
    chat = await gateway.text.worked(size, body.count, traits)
    prompt = await render(gateway.text, chat, max_tokens=None)
    return response(200, {"input_tokens": len(prompt.ids)}, _headers(body, traits, caller))


def _traits(gateway: Gateway, body: CountTokensBody) -> ModelTraits:
    """Return the traits of the model, with the chat template for ``body``. Raises InvalidRequest if it has none."""
    tools = bool(body.tools) and (body.tool_choice is None or body.tool_choice.type != "none")
    template = gateway.text.tokenizer.chat_template(tools=tools)
    formats = gateway.formats
    return ModelTraits(
        template.variables, shows_late_system(template), formats.has_reasoning, formats.takes_thinking_budgets
    )


def _headers(body: CountTokensBody, traits: ModelTraits, caller: Caller) -> dict[str, str]:
    return ignored_header(body, body.unhonoured(traits)) | {REQUEST_ID_HEADER: caller.request_id}
