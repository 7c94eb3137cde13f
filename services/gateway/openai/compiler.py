"""The pipeline from a validated body to the jobs that schedulers get.

HTTP requests, Batch lines and the Python client run the same steps in the same order:

1. ``Compiler.draft`` runs the checks that need no prompt, and makes the settings that all prompts of a body share.
2. ``Compiler.encode`` turns texts into token ids. ``Compiler.render`` does so with a conversation, and adds to the
   grammar what the model may write besides the answer: its reasoning, and calls of tools.
3. ``Compiler.jobs`` runs the checks that need the prompts, and makes a job of each.
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
from services.gateway.openai.conversation import check_tools, continued, make_grammar, make_reader
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.grammar.answer import Thoughts
from services.gateway.openai.grammar.wanted import wanted_grammar
from services.gateway.openai.jobs import make_jobs
from services.gateway.openai.lengths import cut, kept_tokens
from services.gateway.openai.limits import NO_LIMITS, Limits
from services.gateway.openai.output.formats import OutputFormats
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
    """A conversation as the model gets it."""

    draft: Draft  # with the grammar of the whole answer
    ids: Sequence[int]
    thoughts: Thoughts
    make_reader: MakeReader
    unknown: list[str]  # parameters that the model's template does not know


class Compiler(NamedTuple):
    """Compiles bodies to jobs for one model.

    ``reads_calls``: False if the caller gets the text of answers as the model writes it, tool calls included.
    """

    text: TextEngine
    formats: OutputFormats
    facts: ModelFacts
    limits: Limits = NO_LIMITS
    reads_calls: bool = True

    @classmethod
    async def of(cls, gateway: Gateway, body: GenerationBody, prompts: int) -> "Compiler":
        """Return the compiler for a body with ``prompts`` prompts. Raises InvalidRequest for too many samples, NotFound
        for an unknown model, and Unavailable if no scheduler serves the model."""
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

        ``logprobs``: None, or the number of alternatives for each token of the answer, which is in ``logprobs_field``.
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
        held = draft.settings.grammar is not None or any(tool.function.strict for tool in body.tools or ())
        tools = check_tools(self.formats, body, body.tool_choice) if self.reads_calls or held else []
        prompt = await render_prompt(
            self.text, self.limits, body, self.facts, self._max_tokens(draft), drop_oldest=drop_oldest
        )
        parallel = body.parallel_tool_calls is not False
        grammar = await make_grammar(
            self.text,
            self.formats,
            body,
            prompt,
            tools,
            draft.settings.grammar,
            choice=body.tool_choice,
            parallel=parallel,
        )
        if grammar is not draft.settings.grammar:
            check_grammar(draft.body, self.facts, grammar)
            draft = draft._replace(settings=replace(draft.settings, grammar=grammar))
        thoughts = prompt.thoughts(continued(body))
        reader = partial(make_reader, self.formats, self.text.vocabulary, body, tools, thoughts, parallel=parallel)
        return Conversation(draft, prompt.ids, thoughts, reader, prompt.unknown)

    def jobs(
        self,
        draft: Draft,
        prompts: Sequence[TokenIds],
        request_id: str,
        *,
        field: str,
        seed: int | None,
        thoughts: Thoughts | None = None,
    ) -> list[PromptRequest]:
        """Return a job for each prompt. Raises InvalidRequest. Takes some 10 us for each prompt.

        ``thoughts``: what the answer begins with; None = as the tokens of each prompt say.
        """
        body, settings = draft.body, draft.settings
        self.limits.check_grammar(len(prompts), body, settings.grammar)
        settings = limit_thinking(settings, body.thinking_token_budget, self.formats, self.facts, thoughts)
        kept = [cut(prompt, draft.kept, body.truncation_side) for prompt in prompts]
        self.limits.check_prompts(kept, field)
        return make_jobs(request_id, kept, settings, self.facts, field=field, max_tokens=draft.max_tokens, seed=seed)

    def _max_tokens(self, draft: Draft) -> int | None:
        """Return the length from which a prompt is rejected before all of it is encoded."""
        return self.facts.max_context_tokens if draft.kept is None else None
