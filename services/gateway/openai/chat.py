"""``POST /v1/chat/completions``."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fastapi import Response

from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat_shape import ChatShape, MakeReader
from services.gateway.openai.chat_storing import ChatKeeper, StoredChatShape
from services.gateway.openai.compiler import RequestCompiler
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.limits import default_max_tokens
from services.gateway.openai.logprobs import names_of_tokens
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import Router
from services.gateway.openai.schemas import ChatBody

router = Router()


class Asked(NamedTuple):
    """A conversation that is compiled to a request for a scheduler."""

    request_id: str
    facts: ModelFacts
    prompts: list[PromptRequest]
    make_reader: MakeReader
    unknown: list[str]  # parameters that the model's template does not know

    @property
    def settings(self) -> Settings:
        """The settings of the samples."""
        return self.prompts[0].settings


async def ask(gateway: Gateway, body: ChatBody, caller: Caller, *, drop_oldest: bool = False) -> Asked:
    """Compile ``body``. Raises TokaError.

    ``drop_oldest``: if the conversation leaves no room for the answer, drop its oldest messages.
    """
    compiler = await RequestCompiler.of(gateway, body, 1)
    draft = await compiler.draft(body, caller, default_tokens=default_max_tokens(body, compiler.facts))
    rendered = await compiler.render(draft, body, drop_oldest=drop_oldest)
    seed = caller.retry_seed if body.seed is None else body.seed
    prompts = compiler.prompt_requests(
        rendered.draft, [rendered.ids], caller.request_id, field="messages", seed=seed, thoughts=rendered.thoughts
    )
    return Asked(caller.request_id, compiler.facts, prompts, rendered.make_reader, rendered.unknown)


@router.answer("/v1/chat/completions", ChatBody, streams=True, in_batch=True)
async def create_chat_completion(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Answer a conversation."""
    body = await parse_large(gateway.text, posted, ChatBody)
    make_shape: Callable[..., ChatShape] = ChatShape
    if body.store:
        keeper = await ChatKeeper.of(gateway, body, caller, posted)
        if caller.idempotency_key and not body.stream and (earlier := await keeper.earlier()) is not None:
            return Response(earlier, headers=ignored_header(body), media_type="application/json")
        make_shape = partial(StoredChatShape, keeper)
    asked = await ask(gateway, body, caller)
    shape = make_shape(
        asked.request_id,
        asked.facts,
        names_of_tokens(gateway.text, body) if asked.settings.logprobs and not asked.settings.packed_logprobs else None,
        include_usage=body.wants_usage,
        running_usage=body.wants_running_usage,
        make_reader=asked.make_reader,
    )
    answer = Answer(gateway, asked.prompts, shape, ignored_header(body, asked.unknown), caller)
    return await answer.respond(stream=bool(body.stream))
