"""Requests of the Python client, which the gateway's compiler compiles."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from services.client.params import SamplingParams
from services.common.errors import InvalidRequest, InvalidValue, TokaError
from services.common.text.vocabulary import TokenIds, Vocabulary
from services.gateway.engine.request import PromptRequest
from services.gateway.engine.text import TextEngine
from services.gateway.http.errors import to_body
from services.gateway.http.request import Caller
from services.gateway.openai.compiler import COMPLETION_TOKENS, Draft, RequestCompiler, seed_of
from services.gateway.openai.grammar.answer import GRAMMAR_FIELD, Thoughts, explain
from services.gateway.openai.limits import cut, default_max_tokens
from services.gateway.openai.parse import parse
from services.gateway.openai.schemas import ChatBody

_NO_CALLER = Caller("", "")
_GRAMMAR_SHARE = 1024  # a sample with a grammar of more bytes counts as several samples

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Drafts = Mapping[tuple[int, bool], Draft]  # by the id of the parameters, and by "is a conversation"


@dataclass(frozen=True)
class ClientRequest:
    """A prompt or a conversation, and its sampling parameters."""

    prompt: Prompt | None
    params: SamplingParams
    conversation: Conversation | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # other fields of the chat completion's body

    @property
    def shown(self) -> str | None:
        """The prompt, if it is a text."""
        return self.prompt if isinstance(self.prompt, str) else None

    @property
    def draft_key(self) -> tuple[int, bool]:
        """Key of the request's draft, which requests with the same parameters share."""
        return id(self.params), self.conversation is not None


@dataclass(frozen=True)
class PreparedRequest:
    """A request with its compiled prompt."""

    request: ClientRequest
    prompt: PromptRequest

    @property
    def samples(self) -> int:
        """Share of the outstanding samples: one for each sample, more if each has a large grammar."""
        settings = self.prompt.settings
        return settings.n if settings.grammar is None else settings.n * -(-settings.grammar.size // _GRAMMAR_SHARE)

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        ids: list[int] = self.prompt.prompt_ids.tolist()
        return ids

    def explain(self, error: TokaError) -> TokaError:
        """Return a scheduler's ``error`` with the parameter names of the client."""
        grammar = self.prompt.settings.grammar
        if not isinstance(error, InvalidRequest):
            return error
        if grammar is not None and error.field == GRAMMAR_FIELD:
            return explain(error, grammar)
        error.field = to_body(error)["error"]["param"] or ""
        return error

    def vocabulary(self, text: TextEngine) -> Vocabulary:
        """Return the vocabulary of the samples, with special tokens if they are part of the text."""
        return text.vocabulary.with_specials if self.prompt.settings.special_tokens else text.vocabulary


async def check(compiler: RequestCompiler, requests: Sequence[ClientRequest]) -> Drafts:
    """Return the drafts of all requests. Raises InvalidRequest for wrong parameters."""
    drafts: dict[tuple[int, bool], Draft] = {}
    for request in {request.draft_key: request for request in requests}.values():
        body, is_chat = request.params.body, request.conversation is not None
        default = default_max_tokens(body, compiler.facts) if is_chat else COMPLETION_TOKENS
        drafts[request.draft_key] = await compiler.draft(body, _NO_CALLER, default_tokens=default)
    return drafts


async def prepare(
    compiler: RequestCompiler, requests: Sequence[ClientRequest], drafts: Drafts, repeats: Counter[tuple[int, bytes]]
) -> list[PreparedRequest | TokaError]:
    """Return each request with its compiled prompt, or the error of its prompt. ``drafts``: the result of ``check``.

    ``repeats`` counts prompts with the same seed. Each of them has a seed of its own.
    """
    encoding = (_encode(compiler, request, drafts[request.draft_key]) for request in requests)
    encoded = await asyncio.gather(*encoding, return_exceptions=True)
    prepared: list[PreparedRequest | TokaError] = []
    for request, one in zip(requests, encoded, strict=True):
        try:
            if isinstance(one, BaseException):
                raise one
            prepared.append(PreparedRequest(request, _prompt_request(compiler, request, one, repeats)))
        except TokaError as error:
            prepared.append(error)
    return prepared


class _Encoded(NamedTuple):
    """The token ids of a prompt, and the draft that they complete."""

    draft: Draft
    ids: TokenIds
    thoughts: Thoughts | None = None


async def _encode(compiler: RequestCompiler, request: ClientRequest, draft: Draft) -> _Encoded:
    if request.conversation is not None:
        return await _encode_chat(compiler, request, draft)
    if isinstance(request.prompt, str):
        special = request.params.add_special_tokens
        [ids] = await compiler.encode(draft, [request.prompt], add_special_tokens=special)
        return _Encoded(draft, ids)
    return _Encoded(draft, _token_ids(request.prompt))


async def _encode_chat(compiler: RequestCompiler, request: ClientRequest, draft: Draft) -> _Encoded:
    try:
        document = orjson.dumps({"messages": list(request.conversation or ()), **request.template})
    except TypeError as error:
        raise InvalidValue(f"messages: {error}", field="messages") from None
    rendered = await compiler.render(draft, parse(document, ChatBody))
    for name in rendered.unknown:
        raise InvalidRequest(f"{name}: this model's chat template does not know it; leave it out", field=name)
    return _Encoded(rendered.draft, rendered.ids, rendered.thoughts)


def _token_ids(prompt: Any) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError):  # such as lists of several depths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32)):
        raise InvalidValue("prompt: expected a text, or a list of token ids", field="prompt")
    return ids.astype(np.uint32)


def _prompt_request(
    compiler: RequestCompiler, request: ClientRequest, encoded: _Encoded, repeats: Counter[tuple[int, bytes]]
) -> PromptRequest:
    seed, draft = request.params.seed, encoded.draft
    ids = cut(np.asarray(encoded.ids, np.uint32), draft.kept, draft.body.truncation_side)
    if seed is not None:
        key = seed, ids.tobytes()
        seed, repeats[key] = seed_of(seed, repeats[key]), repeats[key] + 1
    [compiled] = compiler.prompt_requests(
        draft,
        [ids],
        f"llm-{secrets.token_hex(16)}",
        field="prompt" if request.conversation is None else "messages",
        seed=seed,
        thoughts=encoded.thoughts,
    )
    return compiled
