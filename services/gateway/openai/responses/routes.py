"""``POST /v1/responses`` and ``POST /v1/responses/input_tokens``."""

import contextlib
import re

from fastapi import Response

from services.common.errors import InvalidRequest, NotFound
from services.gateway.engine.text import INLINE_BYTES
from services.gateway.http.errors import response
from services.gateway.http.idempotency import fingerprint
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat import ask
from services.gateway.openai.conversation import check_tools
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.responses.body import InputTokensBody, ResponsesBody
from services.gateway.openai.responses.in_background import respond_in_background
from services.gateway.openai.responses.keeping import with_conversation
from services.gateway.openai.responses.shape import ResponseShape
from services.gateway.openai.router import Router
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.sse import EventStream
from services.gateway.openai.truncation import render_prompt
from services.gateway.store.ids import new_id
from services.gateway.store.service import NO_STORE

CREATE = "/v1/responses"
_INLINE_ITEMS = 512  # maximum number of items that are translated on the event loop
# Parameters of chat completions, and the parameters that replace them here.
_PARAMETERS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
# Names that occur in messages only as parameters. "messages" is also a word.
_RENAMED = re.compile(rf"\b({'|'.join(name for name in _PARAMETERS if '_' in name)})\b")

router = Router()


@router.answer(CREATE, ResponsesBody, streams=True, in_batch=True)
async def create_response(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Answer a conversation, in items."""
    body = await parse_large(gateway.text, posted, ResponsesBody)
    ignored = ignored_header(body, body.left_out)
    response_id = new_id("resp_")
    if caller.idempotency_key and body.store is not False and gateway.config.store_url != NO_STORE:
        store = await gateway.store.opened()
        same = fingerprint(CREATE, posted.raw)
        response_id = "resp_" + await store.tries.name(caller.owner, caller.idempotency_key, same)
        if body.background or not body.stream:
            with contextlib.suppress(NotFound):
                kept = await store.responses.get(response_id, caller.owner)
                if body.stream:
                    events = store.background.follow(response_id, caller.owner, 0)
                    return EventStream(events, lambda disconnected: None, ignored)
                return Response(kept.body, headers=ignored, media_type="application/json")
    if body.background and body.store is None:
        body = body.model_copy(update={"store": True})  # rejected if the gateway has no store
    body, keeper = await with_conversation(gateway, body, posted.bytes, caller.owner)
    try:
        chat = await _chat(gateway, posted, body)
        asked = await ask(gateway, chat, caller, drop_oldest=body.drops_oldest)
        token_text = gateway.text.token_text if asked.settings.logprobs else None
        shape = ResponseShape(asked.request_id, asked.facts, body, asked.make_reader, token_text, keeper, response_id)
        ignored = ignored_header(body, [*body.left_out, *asked.unknown])
        answer = Answer(gateway, asked.prompts, shape, ignored, caller)
        if body.background and keeper is not None:
            return await respond_in_background(gateway, answer, shape, keeper, caller, stream=bool(body.stream))
        return await answer.respond(stream=bool(body.stream))
    except InvalidRequest as error:
        raise _renamed(error) from None


@router.answer("/v1/responses/input_tokens", InputTokensBody)
async def count_input_tokens(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Count the tokens of the prompt that a response would be generated from."""
    body = await parse_large(gateway.text, posted, InputTokensBody)
    ignored = ignored_header(body, body.left_out)
    counted, _ = await with_conversation(gateway, body, posted.bytes, caller.owner, keeps=False)
    try:
        chat = await _chat(gateway, posted, counted)
        facts = await gateway.fleet.model(chat.model)
        check_tools(gateway.formats, chat)
        prompt = await render_prompt(gateway.text, gateway.limits, chat, facts, None, drop_oldest=counted.drops_oldest)
    except InvalidRequest as error:
        raise _renamed(error) from None
    return response(200, {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}, ignored)


async def _chat(gateway: Gateway, posted: Posted, body: ResponsesBody) -> ChatBody:
    """Return ``body`` as a chat completion. Raises InvalidRequest."""
    large = posted.bytes > INLINE_BYTES or len(body.input) > _INLINE_ITEMS
    return await gateway.text.in_thread(body.chat) if large else body.chat()


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """Return ``error``, which names parameters of chat completions, with the names that they have here."""
    error.field = _PARAMETERS.get(error.field, error.field)
    error.message = _RENAMED.sub(lambda name: _PARAMETERS[name[0]], error.message)
    return error
