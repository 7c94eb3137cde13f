"""Charges a call to its key's tokens per minute."""

from collections.abc import Iterable

from services.common.keys import Key
from services.common.limits import DEFAULT_ANSWER_TOKENS, KeyLimits, Reservation
from services.scheduler.core.request import Finish


class Spending:
    """Charge of one call, on the event loop.

    If the client disconnects, it is the larger of the reserved and the generated tokens.
    """

    def __init__(self, limits: KeyLimits, key: Key | None) -> None:
        self._limits = limits
        self._key = key
        self._reserved: Reservation | None = None
        self._prompt_tokens = 0
        self._used = 0

    def reserve(self, prompt_tokens: int, samples: int, max_tokens: int | None) -> None:
        """Reserve tokens before the call starts. Raises ``TokaError`` if the key has too few tokens."""
        most = DEFAULT_ANSWER_TOKENS if max_tokens is None else max_tokens
        self._reserved = self._limits.reserve(self._key, prompt_tokens + samples * most, field="stopping.max_tokens")
        self._prompt_tokens = self._used = prompt_tokens

    def finished(self, finishes: Iterable[Finish], unfinished: int) -> None:
        """Add finished samples. ``unfinished`` is the number of samples that still run."""
        self._used += sum(finish.completion_tokens for finish in finishes)
        if not unfinished:
            self._settle(self._used)

    def close(self, generated: int) -> None:
        """Settle the charge of an incomplete call. ``generated`` is the number of tokens of all its samples."""
        if self._reserved is not None:
            self._settle(max(self._reserved.tokens, self._prompt_tokens + generated))

    def give_back(self) -> None:
        """Return all reserved tokens of a rejected request."""
        self._settle(0)

    def _settle(self, tokens: int) -> None:
        if self._reserved is not None:
            self._reserved.settle(tokens)
            self._reserved = None
