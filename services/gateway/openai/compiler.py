"""The pipeline from a validated body to the prompt requests that schedulers get.

HTTP requests, Batch lines and the Python client run the same steps in the same order:

1. ``RequestCompiler.draft`` runs the checks that need no prompt, and makes the settings that all prompts of a body
   share.
2. ``RequestCompiler.encode`` turns texts into token ids. ``RequestCompiler.render`` does so with a conversation, and
   adds to the grammar what the model may write besides the answer: its reasoning, and calls of tools.
3. ``RequestCompiler.prompt_requests`` runs the checks that need the prompts, and makes a request of each.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.text import TextEngine
from services.gateway.http.request import Caller
from services.gateway.openai.chat_shape import MakeReader
from services.gateway.openai.conversation import check_tools, make_grammar
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.grammar.answer import Thoughts
from services.gateway.openai.grammar.wanted import wanted_grammar
from services.gateway.openai.lengths import cut, kept_tokens
from services.gateway.openai.limits import NO_LIMITS, Limits
from services.gateway.openai.messages import NamedTool
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.prompt_requests import make_prompt_requests
from services.gateway.openai.schemas import ChatBody, GenerationBody
from services.gateway.openai.settings import check_grammar, make_settings
from services.gateway.openai.thinking import limit_thinking
from services.gateway.openai.truncation import render_prompt


class Draft(NamedTuple):
    """A body whose prompts have no token ids yet."""

    body: GenerationBody
    settings: Settings
    max_tokens: int | None  # of each answer. None: the rest of the context
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

    async def draft(
        self,
        body: GenerationBody,
        caller: Caller,
        *,
        logprobs: int | None,
        logprobs_field: str,
        default_max_tokens: int | None,
    ) -> Draft:
        """Return the draft of ``body``. Raises InvalidRequest.

        ``logprobs``: number of alternatives for each token of the answer, from the field ``logprobs_field``. None if
        the caller wants no log-probabilities.
        """
        max_tokens = self.limits.max_tokens(body, default_max_tokens)
        kept = kept_tokens(body, self.facts, self.limits.prompt_tokens)
        grammar = await wanted_grammar(self.text, body)
        settings = make_settings(body, self.facts, logprobs, logprobs_field, caller, grammar)
        return Draft(body, settings, max_tokens, kept)

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
        body, settings = draft.body, draft.settings
        self.limits.check_grammar(len(prompts), body, settings.grammar)
        settings = limit_thinking(settings, body.thinking_token_budget, self.formats, self.facts, thoughts)
        kept = [cut(prompt, draft.kept, body.truncation_side) for prompt in prompts]
        self.limits.check_prompts(kept, field)
        return make_prompt_requests(
            request_id, kept, settings, self.facts, field=field, max_tokens=draft.max_tokens, seed=seed
        )

    def _max_tokens(self, draft: Draft) -> int | None:
        """Return the length from which a prompt is rejected before all of it is encoded."""
        return self.facts.max_context_tokens if draft.kept is None else None
