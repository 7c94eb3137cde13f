"""Sets of stop tokens, tested for all rows of a step together."""

import numpy as np
import numpy.typing as npt

from services.scheduler.core.numbering import Numbering


class StopTokens:
    """Numbered sets of tokens as rows of bits. Set 0 is empty. Owned by the core."""

    def __init__(self, vocab_size: int) -> None:
        self._bits = np.zeros((4, vocab_size // 8 + 1), np.uint8)
        self._sets: Numbering[frozenset[int]] = Numbering()
        self._sets.acquire(frozenset(), 1)

    def acquire(self, tokens: frozenset[int], users: int) -> int:
        """Return the number of a set, for ``users`` more users."""
        known = tokens in self._sets.numbers
        row = self._sets.acquire(tokens, users)
        if not known:
            if row == len(self._bits):
                self._bits = np.concatenate((self._bits, np.zeros_like(self._bits)))
            ids = np.fromiter(tokens, np.int64, len(tokens))
            np.bitwise_or.at(self._bits[row], ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        return row

    def release(self, tokens: frozenset[int]) -> None:
        """Remove one user of a set."""
        row = self._sets.release(tokens)
        if row is not None:
            self._bits[row] = 0

    def contain(self, sets: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether ``tokens[i]`` is in set ``sets[i]``: bool ``[rows]``."""
        found: npt.NDArray[np.bool_] = (self._bits[sets, tokens >> 3] >> (tokens & 7).astype(np.uint8)) & 1 != 0
        return found
