"""Checks the thinking budget of a request."""

import numpy as np

from services.common.errors import InvalidRequest
from services.common.text.thinking import BEGINS, ENDS
from services.scheduler.api.model import ServedModel
from tokasaurus.common.v1.sampling_pb2 import ThinkingBudget

_FIELD = "sampling.thinking"


def complete_thinking(message: ThinkingBudget, prompt: np.ndarray, model: ServedModel) -> None:
    """Check ``message`` and set its defaults in place. ``prompt [tokens]`` uint32 excludes generated tokens.

    Raises InvalidRequest naming the field.
    """
    if not model.shape.thinking_budgets:
        raise InvalidRequest("the worker has no thinking budgets: leave it out, or use a newer worker", field=_FIELD)
    if not message.HasField("tokens"):
        raise InvalidRequest("tokens is not set: expected the limit of the section", field=f"{_FIELD}.tokens")
    known = model.thinking_tokens
    end = _token(message, "end_token_id", known.end, ENDS, model)
    begin = _token(message, "begin_token_id", known.begin, BEGINS, model) if not message.opened else 0
    if not message.HasField("opened"):
        message.opened = _last(prompt, begin) > _last(prompt, end)
    message.end_token_id = end
    if message.opened:
        message.ClearField("begin_token_id")
    else:
        message.begin_token_id = begin


def _token(message: ThinkingBudget, name: str, default: int | None, mark: str, model: ServedModel) -> int:
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
