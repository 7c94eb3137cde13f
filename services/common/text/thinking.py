"""The tokens that begin and end a model's reasoning section."""

from typing import NamedTuple

from services.common.text.tokenizer import Tokenizer

BEGINS, ENDS = "<think>", "</think>"


class ThinkingTokens(NamedTuple):
    """Token ids of the marks. None if the tokenizer has no single token for a mark."""

    begin: int | None
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ThinkingTokens":
        """Return the marks' tokens in ``tokenizer``."""
        found = (tokenizer.encode(mark, add_special_tokens=False) for mark in (BEGINS, ENDS))
        return cls(*(ids[0] if len(ids) == 1 else None for ids in found))


NO_THINKING_TOKENS = ThinkingTokens(None, None)
