"""The pipeline from a validated body to the prompt requests that schedulers get.

HTTP requests, Batch lines and the Python client run the same steps in the same order:

1. ``RequestCompiler.draft`` runs the checks that need no prompt, and makes the settings that all prompts of a body
   share.
2. ``RequestCompiler.encode`` turns texts into token ids. ``RequestCompiler.render`` does so with a conversation, and
   adds to the grammar what the model may write besides the answer: its reasoning, and calls of tools.
3. ``RequestCompiler.prompt_requests`` runs the checks that need the prompts, and makes a request of each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from services.common.errors import InvalidValue
from services.common.request_bounds import MAX_BIAS_COPIES, MAX_PROMPT_LOGPROBS
from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.text import TextEngine, check_token_ids
from services.gateway.http.request import Caller
from services.gateway.openai.chat_shape import MakeReader
from services.gateway.openai.conversation import check_tools, make_grammar
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.grammar.answer import Thoughts
from services.gateway.openai.grammar.wanted import wanted_grammar
from services.gateway.openai.limits import NO_LIMITS, Limits, cut
from services.gateway.openai.messages import NamedTool
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.schemas import ChatBody, GenerationBody
from services.gateway.openai.settings import check_grammar, limit_thinking, make_settings
from services.gateway.openai.truncation import render_prompt

COMPLETION_TOKENS = 16  # default of max_tokens for completions
_U64 = 2**64


class Draft(NamedTuple):
    """A body whose prompts have no token ids yet."""

    body: GenerationBody
    settings: Settings
    max_tokens: int | None  # of each answer. 0: only score the prompt. None: the rest of the context
    kept: int | None  # number of tokens that a longer prompt is truncated to. None: prompts are not truncated


class Conversation(NamedTuple):
    """A conversation in the form that the model gets."""

    draft: Draft  # with the grammar of the whole answer
    ids: Sequence[int]
    thoughts: Thoughts
    make_reader: MakeReader
    unknown: list[str]  # parameters that the model's template does not know


class RequestCompiler(NamedTuple):
    """Compiles bodies to prompt requests for one model.

    ``reads_calls``: False if the caller gets the text of answers as the model writes it, tool calls included.
    """

    text: TextEngine
    formats: OutputFormats
    facts: ModelFacts
    limits: Limits = NO_LIMITS
    reads_calls: bool = True

    @classmethod
    async def of(cls, gateway: Gateway, body: GenerationBody, prompts: int) -> "RequestCompiler":
        """Return the compiler for a body with ``prompts`` prompts.

        Raises InvalidRequest for too many samples, NotFound for an unknown model, and Unavailable if no scheduler
        serves the model.
        """
        gateway.limits.check_samples(prompts, body)
        return cls(gateway.text, gateway.formats, await gateway.fleet.model(body.model), gateway.limits)

    async def draft(self, body: GenerationBody, caller: Caller, *, default_tokens: int | None) -> Draft:
        """Return the draft of ``body``. Raises InvalidRequest.

        ``default_tokens``: the maximum number of tokens of each answer if ``body`` sets none. None: the rest of the
        context.
        """
        max_tokens = self.limits.max_tokens(body, default_tokens)
        kept = self.limits.kept_tokens(body, self.facts)
        grammar = await wanted_grammar(self.text, body)
        return Draft(body, make_settings(body, self.facts, caller, grammar), max_tokens, kept)

    async def encode(self, draft: Draft, texts: list[str], *, add_special_tokens: bool) -> Sequence[TokenIds]:
        """Return the token ids of prompts. Raises InvalidRequest."""
        return await self.text.encode(
            texts, max_tokens=self._max_tokens(draft), field="prompt", add_special_tokens=add_special_tokens
        )

    async def render(self, draft: Draft, body: ChatBody, *, drop_oldest: bool = False) -> Conversation:
        """Return the conversation of ``body``. Raises InvalidRequest.

        ``drop_oldest``: if the conversation leaves no room for the answer, drop its oldest messages.
        """
        constrained = draft.settings.grammar is not None or any(tool.function.strict for tool in body.tools or ())
        tools = check_tools(self.formats, body) if self.reads_calls or constrained else []
        prompt = await render_prompt(
            self.text, self.limits, body, self.facts, self._max_tokens(draft), drop_oldest=drop_oldest
        )
        thoughts = prompt.thoughts(body.continued)
        grammar = await make_grammar(self.text, self.formats, body, thoughts, tools, draft.settings.grammar)
        if grammar is not draft.settings.grammar:
            check_grammar(draft.body, self.facts, grammar)
            draft = draft._replace(settings=replace(draft.settings, grammar=grammar))
        make_reader = partial(
            self.formats.reader,
            self.text.vocabulary,
            tools=[tool.function.name for tool in tools],
            parallel=body.parallel_tool_calls is not False,
            named=isinstance(body.tool_choice, NamedTool),
            thinking_opened=self.formats.reasoning and thoughts is Thoughts.OPENED,
        )
        return Conversation(draft, prompt.ids, thoughts, make_reader, prompt.unknown)

    def prompt_requests(
        self,
        draft: Draft,
        prompts: Sequence[TokenIds],
        request_id: str,
        *,
        field: str,
        seed: int | None,
        thoughts: Thoughts | None = None,
    ) -> list[PromptRequest]:
        """Return a request for each prompt. Raises InvalidRequest. Takes about 10 us for each prompt.

        ``thoughts``: the beginning of the answer. None: the end of each prompt decides.
        """
        body, facts, settings = draft.body, self.facts, draft.settings
        self.limits.check_grammar(len(prompts), body, settings.grammar)
        settings = limit_thinking(settings, body.thinking_token_budget, self.formats, facts, thoughts)
        kept = [cut(prompt, draft.kept, body.truncation_side) for prompt in prompts]
        self.limits.check_prompts(kept, field)
        _check_bias_copies(len(prompts), settings)
        _check_prompt_logprobs(sum(map(len, kept)), settings)
        requests = []
        seen: Counter[bytes] = Counter()
        for number, prompt in enumerate(kept):
            ids = np.asarray(prompt, np.uint32)
            check_token_ids(ids, facts.vocab_size, facts.max_context_tokens, field)
            _check_prompt_logprobs_start(settings.prompt_logprobs_start, len(ids))
            _check_routed_experts_start(settings.routed_experts_start, len(ids))
            repeat = 0
            if seed is not None and len(prompts) > 1:
                key = ids.tobytes()
                repeat, seen[key] = seen[key], seen[key] + 1
            room = facts.max_context_tokens - len(ids)
            _check_min_tokens(settings.min_tokens, draft.max_tokens, room)
            requests.append(
                PromptRequest(
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                    model=facts.id,
                    prompt_ids=ids,
                    max_tokens=room if draft.max_tokens is None else min(max(draft.max_tokens, 1), room),
                    seed=None if seed is None else seed_of(seed, repeat),
                    settings=settings,
                )
            )
        return requests

    def _max_tokens(self, draft: Draft) -> int | None:
        """Return the length from which a prompt is rejected before all of it is encoded."""
        return self.facts.max_context_tokens if draft.kept is None else None


def seed_of(seed: int, repeat: int) -> int:
    """Return the seed of a prompt's occurrence number ``repeat`` in one request.

    The first occurrence has the caller's seed, so that a prompt gets the same answer alone and in a list. Each later
    occurrence has another seed.
    """
    mixed = (seed + repeat * 0x9E3779B97F4A7C15) % _U64
    if repeat:
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _U64
        mixed ^= mixed >> 31
    return mixed


def _check_bias_copies(prompts: int, settings: Settings) -> None:
    """Raise InvalidRequest if all samples together have too many bias entries. Each sample has a copy of the bias."""
    choices, entries = prompts * settings.n, len(settings.sampling.logit_bias_token_ids)
    if choices * entries > MAX_BIAS_COPIES:
        raise InvalidValue.at(
            "logit_bias",
            f"{entries} tokens for each of {choices} choices are more than {MAX_BIAS_COPIES}; send several"
            " requests, or bias fewer tokens",
        )


def _check_prompt_logprobs(prompt_tokens: int, settings: Settings) -> None:
    """Raise InvalidRequest for too many log-probabilities of prompts. Each choice has those of its prompt."""
    if settings.prompt_logprobs is None:
        return
    field = "echo" if settings.requested_prompt_logprobs is None else "prompt_logprobs"
    entries = prompt_tokens * settings.n * (settings.prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidValue.at(
            field,
            f"{settings.prompt_logprobs + 1} log-probabilities for each of {prompt_tokens} prompt tokens of"
            f" {settings.n} samples are more than {MAX_PROMPT_LOGPROBS}; send several requests, or ask for fewer",
        )


def _check_prompt_logprobs_start(start: int, prompt_tokens: int) -> None:
    if start >= prompt_tokens:
        raise InvalidValue(
            f"prompt_logprobs_start={start}: the prompt has {prompt_tokens} tokens; expected 0 to {prompt_tokens - 1}",
            field="prompt_logprobs_start",
        )


def _check_routed_experts_start(start: int, prompt_tokens: int) -> None:
    if start > prompt_tokens:
        raise InvalidValue(
            f"routed_experts_prompt_start={start}: the prompt has {prompt_tokens} tokens; expected at most that",
            field="routed_experts_prompt_start",
        )


def _check_min_tokens(least: int, max_tokens: int | None, room: int) -> None:
    if max_tokens is not None and least > max_tokens:
        limit = f"max_tokens={max_tokens}"
    elif least > room:
        limit = f"the {room} tokens that the context has left behind the prompt"
    else:
        return
    raise InvalidValue(f"min_tokens={least} is more than {limit}; ask for less", field="min_tokens")
