"""The limit of a reasoning section, sent by the scheduler and enforced by the worker."""

from typing import NamedTuple

OPENING_TOKENS = 8  # a reasoning section must begin within the first tokens of an answer


class ThinkingBudget(NamedTuple):
    """Limit of a reasoning section: after ``tokens`` tokens inside it, ``end_token_id`` is forced."""

    tokens: int
    end_token_id: int
    begin_token_id: int | None = None  # None: the prompt has opened the section
