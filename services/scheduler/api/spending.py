"""What a call takes of its key's tokens a minute."""

from collections.abc import Iterable

from services.common.keys import Key
from services.common.limits import DEFAULT_ANSWER_TOKENS, KeyLimits, Reservation
from services.scheduler.core.request import Finish


class Spending:
    """Of one generation, on the asyncio loop. One that its client leaves costs what was reserved, or what was made of
    it if that is more."""

    def __init__(self, limits: KeyLimits, key: Key | None) -> None:
        self._limits = limits
        self._key = key
        self._reserved: Reservation | None = None
        self._prompt_tokens = 0
        self._used = 0

    def reserve(self, prompt_tokens: int, samples: int, max_tokens: int | None) -> None:
        """Before it begins. Raises ``TokaError`` when the key has not so many tokens."""
        most = DEFAULT_ANSWER_TOKENS if max_tokens is None else max_tokens
        self._reserved = self._limits.reserve(self._key, prompt_tokens + samples * most, field="stopping.max_tokens")
        self._prompt_tokens = self._used = prompt_tokens

    def finished(self, finishes: Iterable[Finish], unfinished: int) -> None:
        """Samples are at their ends, and so many are not yet."""
        self._used += sum(finish.completion_tokens for finish in finishes)
        if self._reserved is not None and not unfinished:
            self._reserved.settle(self._used)
            self._reserved = None

    def close(self, made: int) -> None:
        """So many tokens came of it, of all its samples, and no more will: where not all are at their ends, this is
        the last word."""
        if self._reserved is not None:
            self._reserved.settle(max(self._reserved.tokens, self._prompt_tokens + made))
            self._reserved = None

    def give_back(self) -> None:
        """It came to nothing."""
        if self._reserved is not None:
            self._reserved.settle(0)
            self._reserved = None
