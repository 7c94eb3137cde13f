"""Reads the thinking budget of a request."""

import numpy as np

from services.common.errors import InvalidRequest
from services.common.text.thinking import BEGINS, ENDS
from services.common.thinking import ThinkingBudget
from services.scheduler.api.model import ServedModel
from tokasaurus.scheduler.v1 import generate_pb2

_FIELD = "sampling.thinking"


def read_thinking(message: generate_pb2.ThinkingBudget, prompt: np.ndarray, model: ServedModel) -> ThinkingBudget:
    """Return the budget with its defaults. ``prompt [tokens]`` uint32 excludes generated tokens.

    Raises InvalidRequest naming the field.
    """
    if not model.shape.thinking_budgets:
        raise InvalidRequest("the worker has no thinking budgets: leave it out, or use a newer worker", field=_FIELD)
    if not message.HasField("tokens"):
        raise InvalidRequest("tokens is not set: expected the limit of the section", field=f"{_FIELD}.tokens")
    known = model.thinking_tokens
    end = _token(message, "end_token_id", known.end, ENDS, model)
    begin = _token(message, "begin_token_id", known.begin, BEGINS, model) if not message.opened else 0
    opened = message.opened if message.HasField("opened") else _last(prompt, begin) > _last(prompt, end)
    return ThinkingBudget(message.tokens, end, None if opened else begin)


def _token(message: generate_pb2.ThinkingBudget, name: str, default: int | None, mark: str, model: ServedModel) -> int:
    """Return the token id of the field ``name``, or the tokenizer's own token for ``mark``."""
    field = f"{_FIELD}.{name}"
    if not message.HasField(name):
        if default is None:
            raise InvalidRequest(f"this model's tokenizer has no single token {mark}: set {name}", field=field)
        return default
    token: int = getattr(message, name)
    if token >= model.card.vocab_size:
        raise InvalidRequest(f"token {token}: this model has ids 0 to {model.card.vocab_size - 1}", field=field)
    return token


def _last(tokens: np.ndarray, token: int) -> int:
    """Return the position of the last ``token`` among ``tokens``, or -1."""
    found = np.flatnonzero(tokens == token)
    return int(found[-1]) if len(found) else -1
