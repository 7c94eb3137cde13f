"""The limit of a reasoning section, as the scheduler sends it and the worker keeps it."""

from typing import NamedTuple

OPENING_TOKENS = 8  # the first tokens of an answer, among which a reasoning section may begin


class ThinkingBudget(NamedTuple):
    """After ``tokens`` tokens inside the section, ``end_token_id`` is forced."""

    tokens: int
    end_token_id: int
    begin_token_id: int | None = None  # None: the section is open where the prompt ends
