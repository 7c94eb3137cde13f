"""Sets of stop tokens, tested for all rows of a step together."""

import numpy as np
import numpy.typing as npt


class StopTokens:
    """Numbered sets of tokens as rows of bits. Set 0 is empty. The number of a set without users is reused."""

    def __init__(self, vocab_size: int) -> None:
        self._width = vocab_size // 8 + 1
        self._bits = np.zeros((4, self._width), np.uint8)
        self._rows: dict[frozenset[int], int] = {frozenset(): 0}
        self._users = [1, 0, 0, 0]
        self._free = [3, 2, 1]

    def acquire(self, tokens: frozenset[int], users: int) -> int:
        """Return the number of a set, for ``users`` more users."""
        row = self._rows.get(tokens)
        if row is None:
            if not self._free:
                size = len(self._bits)
                self._bits = np.concatenate((self._bits, np.zeros_like(self._bits)))
                self._users += [0] * size
                self._free = list(range(2 * size - 1, size - 1, -1))
            row = self._rows[tokens] = self._free.pop()
            ids = np.fromiter(tokens, np.int64, len(tokens))
            np.bitwise_or.at(self._bits[row], ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        self._users[row] += users
        return row

    def release(self, tokens: frozenset[int]) -> None:
        """Remove one user of a set."""
        row = self._rows[tokens]
        self._users[row] -= 1
        if self._users[row] == 0:
            del self._rows[tokens]
            self._bits[row] = 0
            self._free.append(row)

    def contain(self, sets: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether ``tokens[i]`` is in set ``sets[i]``: bool ``[rows]``."""
        found: npt.NDArray[np.bool_] = (self._bits[sets, tokens >> 3] >> (tokens & 7).astype(np.uint8)) & 1 != 0
        return found
