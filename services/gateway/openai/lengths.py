"""Lengths of prompts and answers that fit into the context of a model."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from services.common.errors import InvalidRequest
from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.openai.schemas import GenerationBody

# Room for the answer after a prompt that is truncated to the context, if the request sets no limit.
DEFAULT_ANSWER_TOKENS = 16

Ids = TypeVar("Ids", Sequence[int], np.ndarray, TokenIds)


def kept_tokens(body: GenerationBody, facts: ModelFacts, most: int | None = None) -> int | None:
    """Return how many trailing prompt tokens to keep, at most ``most``, or None for all.

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
    return kept if kept > 0 else min(room, most or room)


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
