"""What a session keeps of its samples, one seat for each handle: when the last token came, and the tokens themselves.
Who streams gets them one by one as well; when the scheduler is lost, another one goes on from them.

A step's tokens are taken in with a few array operations, however many samples it has. Tokens lie in blocks, each linked
to the one before it in its sample, so that a sample may have any number and takes no more than it needs.
"""

from itertools import chain

import numpy as np

BLOCK_TOKENS = 64
_SEATS = 16_384  # to begin with
_BLOCKS = 1_024
_NONE = -1


class Seats:
    """Handles are small numbers, so arrays are indexed by them. Owned by a session."""

    def __init__(self) -> None:
        self.taken = np.zeros(_SEATS, bool)
        self.fed = np.zeros(_SEATS, bool)  # its tokens are wanted one by one
        self.last_at = np.zeros(_SEATS)  # float64, time of the last token; 0 = none yet
        self._block = np.full(_SEATS, _NONE, np.int32)  # the one being filled
        self._filled = np.full(_SEATS, BLOCK_TOKENS, np.int32)  # tokens in it; full = the next token needs another
        self._next = 0
        self._tokens = np.zeros((_BLOCKS, BLOCK_TOKENS), np.uint32)
        self._before = np.full(_BLOCKS, _NONE, np.int32)  # block -> the one before it in its sample
        self._free = list(range(_BLOCKS))

    def take(self, count: int, *, fed: bool) -> int:
        """``count`` free handles in a row: the first."""
        start = self._find(count)
        seats = slice(start, start + count)
        self.taken[seats], self.fed[seats], self.last_at[seats] = True, fed, 0.0
        self._next = start + count
        return start

    def give(self, handle: int) -> np.ndarray:
        """Free a handle: its tokens, uint32; none when it was free."""
        tokens = self.tokens(handle)
        self.taken[handle] = self.fed[handle] = False
        block = int(self._block[handle])
        while block != _NONE:
            self._free.append(block)
            block = int(self._before[block])
        self._block[handle], self._filled[handle] = _NONE, BLOCK_TOKENS
        return tokens

    def tokens(self, handle: int) -> np.ndarray:
        """Those that a handle has, uint32."""
        block, filled, parts = int(self._block[handle]), int(self._filled[handle]), []
        while block != _NONE:
            parts.append(self._tokens[block, :filled])
            block, filled = int(self._before[block]), BLOCK_TOKENS
        if len(parts) == 1:
            return parts[0].copy()
        return np.concatenate(parts[::-1]) if parts else self._tokens[0, :0]

    def store(self, handles: np.ndarray, tokens: np.ndarray) -> None:
        """One more token for each of ``handles`` (each once); arrays beside each other."""
        at = self._filled[handles]
        full = handles[at == BLOCK_TOKENS]
        if len(full):
            blocks = self._take_blocks(len(full))
            self._before[blocks] = self._block[full]
            self._block[full] = blocks
            self._filled[full] = 0
            at = self._filled[handles]
        self._tokens[self._block[handles], at] = tokens
        self._filled[handles] = at + 1

    def _take_blocks(self, count: int) -> list[int]:
        if count > len(self._free):
            old = len(self._tokens)
            size = max(2 * old, old + count)
            self._tokens = _grown(self._tokens, size, 0)
            self._before = _grown(self._before, size, _NONE)
            self._free += range(old, size)
        blocks = self._free[-count:]
        del self._free[-count:]
        return blocks

    def _find(self, count: int) -> int:
        """The next ``count`` free seats behind the last that were taken, else from the start, else new ones."""
        size = len(self.taken)
        end = size - count + 1
        for start in chain(range(self._next, end, count), range(0, min(self._next, end), count)):
            if not self.taken[start : start + count].any():
                return start
        first, size = size, max(2 * size, size + count)
        self.taken, self.fed = _grown(self.taken, size, False), _grown(self.fed, size, False)
        self.last_at = _grown(self.last_at, size, 0.0)
        self._block, self._filled = _grown(self._block, size, _NONE), _grown(self._filled, size, BLOCK_TOKENS)
        return first


def _grown(array: np.ndarray, size: int, value: float) -> np.ndarray:
    larger = np.full((size, *array.shape[1:]), value, array.dtype)
    larger[: len(array)] = array
    return larger
