"""The experts of a sample's tokens, collected while it runs."""

import numpy as np

from services.gateway.engine.codec import SampleEnding
from services.gateway.engine.request import Settings


class ReceivedExperts:
    """The experts of consecutive tokens of one sample, from ``Settings.routed_experts_start`` on."""

    __slots__ = ("_start", "data", "tokens")

    def __init__(self, start: int) -> None:
        self._start = start
        self.data = bytearray()  # the experts of ``tokens`` tokens; a copy, because each message also has other samples
        self.tokens = 0

    @classmethod
    def of(cls, settings: Settings) -> "ReceivedExperts | None":
        """Return an empty collection, or None if the request wants no experts."""
        return None if settings.routed_experts is None else cls(settings.routed_experts_start)

    def add(self, start: int, experts: np.ndarray) -> None:
        """Append the experts of tokens from position ``start`` on, uint8 ``[tokens, token_bytes]``.

        Rows that were received before are dropped. Raises ``ValueError`` if rows of earlier tokens are missing.
        """
        expected = self._start + self.tokens
        if start > expected:
            raise ValueError(f"the experts of tokens {expected} to {start - 1} are missing")
        rest = experts[expected - start :]
        self.data += rest.tobytes()
        self.tokens += len(rest)

    def missing(self, ending: SampleEnding) -> int:
        """Return the number of tokens that were computed before ``ending`` and have no experts."""
        if not ending.completion_tokens:  # it may have ended inside of the prompt
            return 0
        return ending.prompt_tokens + ending.completion_tokens - 1 - self._start - self.tokens
