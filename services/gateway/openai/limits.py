"""Limits on requests: those of the operator, and the lengths of prompts and answers that fit into the context."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from services.common.config import GatewayConfig
from services.common.errors import InvalidGrammar, InvalidRequest, InvalidValue
from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import Grammar
from services.gateway.openai.schemas import GenerationBody

# Memory that schedulers and workers use for the grammar of one request. Each sample has a copy.
MAX_GRAMMAR_COPIES_BYTES = 16 * 1024 * 1024
# Room for the answer after a prompt that is truncated to the context, if the request sets no limit.
DEFAULT_ANSWER_TOKENS = 16

Ids = TypeVar("Ids", Sequence[int], np.ndarray, TokenIds)


class Limits(NamedTuple):
    """The limits of one request. None: no limit."""

    samples: int | None = None  # of all prompts together
    output_tokens: int | None = None  # of each sample
    prompt_tokens: int | None = None  # of each prompt
    grammar_bytes: int | None = None  # of all samples together

    @classmethod
    def of(cls, config: GatewayConfig) -> "Limits":
        """Return the limits that the flags of a gateway set."""
        return cls(config.max_choices, config.max_output_tokens, config.max_prompt_tokens, MAX_GRAMMAR_COPIES_BYTES)

    def check_samples(self, prompts: int, body: GenerationBody) -> None:
        """Raise InvalidRequest if a body with ``prompts`` prompts asks for too many samples."""
        if self.samples is not None and prompts * body.samples > self.samples:
            given = "best_of" if body.samples > (body.n or 1) else "n"
            raise InvalidValue(
                f"{prompts} prompt(s) with {given}={body.samples} are more than {self.samples} choices;"
                " send several requests",
                field=given if body.samples > 1 else "prompt",
            )

    def max_tokens(self, body: GenerationBody, default: int | None) -> int | None:
        """Return the maximum number of tokens of each answer, or None for the rest of the context.

        ``default``: the maximum if ``body`` sets none. Raises InvalidRequest if ``body`` sets too large a maximum.
        """
        asked, most = body.most_tokens, self.output_tokens
        if most is None:
            return default if asked is None else asked
        if asked is None:
            return most if default is None else min(default, most)
        if asked > most:
            field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidValue(
                f"{field}={asked}: this server makes at most {most} tokens of each answer; ask for less", field=field
            )
        return asked

    def kept_tokens(self, body: GenerationBody, facts: ModelFacts) -> int | None:
        """Return how many trailing prompt tokens to keep, or None for all.

        Raises ``InvalidRequest`` if the rest of the context cannot hold the answer, or the answer leaves no room for a
        prompt.
        """
        kept = body.truncate_prompt_tokens
        if kept is None:
            return None
        asked = DEFAULT_ANSWER_TOKENS if body.most_tokens is None else body.most_tokens
        answer = 1 if kept > 0 else max(1, asked, body.min_tokens or 0)
        room = facts.max_context_tokens - answer
        if kept > room or room < 1:
            what = "leaves no room for an answer" if kept > 0 else f"leaves no room for a prompt before {answer} tokens"
            raise InvalidRequest(
                f"truncate_prompt_tokens={kept} {what}: this model's context is"
                f" {facts.max_context_tokens} tokens, prompt and answer together",
                field="truncate_prompt_tokens",
                reason="CONTEXT_LENGTH_EXCEEDED",
            )
        return kept if kept > 0 else min(room, self.prompt_tokens or room)

    def check_prompts(self, prompts: Sequence[TokenIds], field: str) -> None:
        """Raise InvalidRequest for a prompt that is too long. The message is OpenAI's, which clients recognise."""
        if (most := self.prompt_tokens) is None:
            return
        for prompt in prompts:
            if len(prompt) > most:
                raise InvalidRequest(
                    f"This model's maximum context length is {most} tokens for prompts on this server. However, your"
                    f" {field} resulted in {len(prompt)} tokens. Please reduce the length of the {field}.",
                    field=field,
                    reason="CONTEXT_LENGTH_EXCEEDED",
                )

    def check_grammar(self, prompts: int, body: GenerationBody, grammar: Grammar | None) -> None:
        """Raise InvalidRequest if the copies of the grammar for all samples are too large."""
        samples, most = prompts * body.samples, self.grammar_bytes
        if most is not None and grammar is not None and samples > 1 and samples * grammar.size > most:
            raise InvalidGrammar.at(
                grammar.field,
                f"{grammar.size} bytes for each of {samples} choices are more than"
                f" {most} bytes; send several requests, or make it smaller",
            )


NO_LIMITS = Limits()


def cut(prompt: Ids, kept: int | None, side: str | None) -> Ids:
    """Return the last ``kept`` tokens of ``prompt``, or the first ones if ``side`` is right. None keeps all tokens."""
    if kept is None:
        return prompt
    return prompt[:kept] if side == "right" else prompt[-kept:]


def default_max_tokens(body: GenerationBody, facts: ModelFacts) -> int | None:
    """Return the maximum number of tokens of an answer if the request sets none, or None for the rest of the context.

    A larger ``min_tokens`` raises the model's default.
    """
    most = facts.default_max_tokens
    return None if most is None else max(most, body.min_tokens or 0)
