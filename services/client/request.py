"""What a caller asks, and the job that it becomes."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from services.client.params import SamplingParams
from services.common.config import GatewayConfig
from services.common.errors import InvalidRequest, TokaError
from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import Grammar, PromptRequest, Settings
from services.gateway.engine.text import TextEngine
from services.gateway.http.errors import to_body
from services.gateway.http.request import Caller
from services.gateway.openai.conversation import Prompt as Rendered
from services.gateway.openai.conversation import check_tools, continued, make_grammar, render
from services.gateway.openai.grammar.answer import GRAMMAR_FIELD, Thoughts, explain
from services.gateway.openai.grammar.wanted import wanted_grammar
from services.gateway.openai.jobs import (
    check_grammar,
    cut,
    default_max_tokens,
    kept_tokens,
    make_jobs,
    make_settings,
    seed_of,
)
from services.gateway.openai.messages import ConversationBody
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.parse import parse
from services.gateway.openai.thinking import limit_thinking

COMPLETION_TOKENS = 16  # where nobody says how many, as over HTTP
_NOBODY = Caller("", "")
_GRAMMAR_SHARE = 1024  # bytes of a grammar that are held for as long as a sample, and count as one
PARSERS = {"tool_call_parser": "auto", "reasoning_parser": "auto"}  # flags: which formats answers have

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Request:
    """A prompt, or a conversation, and how to sample."""

    prompt: Prompt | None
    params: SamplingParams
    conversation: Conversation | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # how to render it, by the names of HTTP
    parsers: Mapping[str, str] = field(default_factory=lambda: PARSERS)

    @property
    def shown(self) -> str | None:
        """The prompt as text, if it is one."""
        return self.prompt if isinstance(self.prompt, str) else None


@dataclass(frozen=True)
class Prepared:
    """A request on its way."""

    request: Request
    job: PromptRequest

    @property
    def samples(self) -> int:
        """Its share of what may be outstanding: one for each sample, more when each has a large grammar."""
        settings = self.job.settings
        return settings.n if settings.grammar is None else settings.n * -(-settings.grammar.size // _GRAMMAR_SHARE)

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = self.job.prompt_ids.tolist()
        return ids

    def in_own_words(self, error: TokaError) -> TokaError:
        """What a scheduler says, by the names of the parameters here."""
        grammar = self.job.settings.grammar
        if not isinstance(error, InvalidRequest):
            return error
        if grammar is not None and error.field == GRAMMAR_FIELD:
            return explain(error, grammar)
        error.field = to_body(error)["error"]["param"] or ""
        return error

    def vocabulary(self, text: TextEngine) -> Vocabulary:
        """Which tokens have text."""
        return text.vocabulary.with_specials if self.job.settings.special_tokens else text.vocabulary


async def check(text: TextEngine, facts: ModelFacts, requests: Sequence[Request]) -> dict[int, Settings]:
    """The settings of all requests, by the id of their parameters. Raises ``InvalidRequest`` for wrong ones."""
    known: dict[int, Settings] = {}
    for params in {id(request.params): request.params for request in requests}.values():
        kept_tokens(params.body, facts)
        grammar = await wanted_grammar(text, params.body)
        known[id(params)] = make_settings(params.body, facts, params.logprobs, "logprobs", _NOBODY, grammar)
    return known


async def prepare(
    text: TextEngine,
    facts: ModelFacts,
    requests: Sequence[Request],
    known: Mapping[int, Settings],
    repeats: Counter[tuple[int, bytes]],
) -> list[Prepared | TokaError]:
    """A job for each request, or what is wrong with its prompt. ``known``: from ``check``.

    ``repeats`` counts prompts with the same seed: each is answered with noise of its own.
    """
    encoding = (_encode(text, facts, request, known[id(request.params)]) for request in requests)
    encoded = await asyncio.gather(*encoding, return_exceptions=True)
    prepared: list[Prepared | TokaError] = []
    for request, one in zip(requests, encoded, strict=True):
        try:
            if isinstance(one, BaseException):
                raise one
            prepared.append(Prepared(request, _job(request, one, facts, repeats)))
        except TokaError as error:
            prepared.append(error)
    return prepared


class _Encoded(NamedTuple):
    """A prompt, and how its answer is sampled."""

    ids: Sequence[int] | np.ndarray
    settings: Settings


async def _encode(text: TextEngine, facts: ModelFacts, request: Request, settings: Settings) -> _Encoded:
    if request.conversation is not None:
        return await _encode_chat(text, facts, request, request.conversation, settings)
    settings = _limited(text, facts, request, settings, None)
    if isinstance(request.prompt, str):
        special = request.params.add_special_tokens
        [ids] = await text.encode([request.prompt], max_tokens=None, field="prompt", add_special_tokens=special)
        return _Encoded(ids, settings)
    return _Encoded(_token_ids(request.prompt), settings)


async def _encode_chat(
    text: TextEngine, facts: ModelFacts, request: Request, conversation: Conversation, settings: Settings
) -> _Encoded:
    try:
        document = orjson.dumps({"messages": list(conversation), **request.template})
    except TypeError as error:
        raise InvalidRequest(f"messages: {error}", field="messages", reason="INVALID_VALUE") from None
    body = parse(document, ConversationBody)
    prompt = await render(text, body, max_tokens=None)
    for name in prompt.unknown:
        raise InvalidRequest(f"{name}: this model's chat template does not know it; leave it out", field=name)
    grammar = await _grammar(text, request.parsers, body, prompt, settings.grammar)
    if grammar is not settings.grammar:
        check_grammar(request.params.body, facts, grammar)
        settings = replace(settings, grammar=grammar)
    settings = _limited(text, facts, request, settings, prompt.thoughts(continued(body)))
    return _Encoded(prompt.ids, settings)


def _limited(
    text: TextEngine, facts: ModelFacts, request: Request, settings: Settings, thoughts: Thoughts | None
) -> Settings:
    """Return ``settings`` with the thinking budget of ``request``. ``thoughts``: as of ``limit_thinking``."""
    if (tokens := request.params.thinking_token_budget) is None:
        return settings
    return limit_thinking(settings, tokens, _formats(request.parsers, text), facts, thoughts)


def _formats(parsers: Mapping[str, str], text: TextEngine) -> OutputFormats:
    return OutputFormats.of(GatewayConfig.model_validate(parsers), text.tokenizer)


async def _grammar(
    text: TextEngine, parsers: Mapping[str, str], body: ConversationBody, prompt: Rendered, wanted: Grammar | None
) -> Grammar | None:
    """As over HTTP: the model's thoughts come before what is ``wanted``, and calls of strict tools are held to them."""
    strict = any(tool.function.strict for tool in body.tools or ())
    if wanted is None and not strict:
        return None
    formats = _formats(parsers, text)
    tools = check_tools(formats, body, None)
    return await make_grammar(text, formats, body, prompt, tools, wanted, choice=None, parallel=True)


def _token_ids(prompt: Any) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError):  # such as lists of several depths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32)):
        raise InvalidRequest("prompt: expected a text, or a list of token ids", field="prompt", reason="INVALID_VALUE")
    return ids.astype(np.uint32)


def _job(
    request: Request,
    encoded: _Encoded,
    facts: ModelFacts,
    repeats: Counter[tuple[int, bytes]],
) -> PromptRequest:
    params = request.params
    ids = np.asarray(encoded.ids, np.uint32)
    kept = cut(ids, kept_tokens(params.body, facts), params.truncation_side)
    seed, chat = params.seed, request.conversation is not None
    if seed is not None:
        key = seed, kept.tobytes()
        seed, repeats[key] = seed_of(seed, repeats[key]), repeats[key] + 1
    most = params.max_tokens
    if most is None:
        most = default_max_tokens(params.body, facts) if chat else COMPLETION_TOKENS
    [job] = make_jobs(
        f"llm-{secrets.token_hex(16)}",
        [kept],
        encoded.settings,
        facts,
        field="messages" if chat else "prompt",
        max_tokens=most,
        seed=seed,
    )
    return job
