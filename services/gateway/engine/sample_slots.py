"""The samples of a session: one slot per handle, with the time of the last token, all tokens and their weights.

Failover resumes a sample from these tokens. A step's tokens are stored with a few array operations, whatever the number
of samples. Tokens are stored in blocks. Each block is linked to the sample's previous block, so a sample may have any
number of tokens and uses little more memory than they need.
"""

from itertools import chain

import numpy as np

from services.gateway.engine.spans import Spans, count_tokens, join_spans

BLOCK_TOKENS = 64
_SLOTS = 16_384  # initial number
_BLOCKS = 1_024  # initial number
_NONE = -1


class SampleSlots:
    """Per-sample state in arrays indexed by handle. Owned by a session."""

    def __init__(self) -> None:
        self.taken = np.zeros(_SLOTS, bool)
        self.per_token = np.zeros(_SLOTS, bool)  # the request receives its tokens one by one
        self.last_at = np.zeros(_SLOTS)  # float64, time of the last token; 0 = none yet
        self._block = np.full(_SLOTS, _NONE, np.int32)  # last block of the sample
        self._filled = np.full(_SLOTS, BLOCK_TOKENS, np.int32)  # tokens in the last block
        self._next = 0
        self._tokens = np.zeros((_BLOCKS, BLOCK_TOKENS), np.uint32)
        self._before = np.full(_BLOCKS, _NONE, np.int32)  # the sample's block before this block
        self._free = list(range(_BLOCKS))
        self._version: str | None = None  # of the weights that generate the next tokens; None: unknown
        self._spans: dict[int, Spans] = {}  # by handle, of the tokens before the last change of the weights

    def change_weights(self, version: str | None) -> None:
        """Set the version of the weights that generated the tokens that are stored from now on. None: unknown."""
        if version != self._version:
            handles = np.flatnonzero(self.taken & (self._block != _NONE)).tolist()
            self._spans = {handle: self.spans(handle) for handle in handles}
            self._version = version

    def spans(self, handle: int) -> Spans:
        """Return which weights generated the tokens of a handle."""
        ended = self._spans.get(handle, ())
        return join_spans(ended, ((self._version, self._count(handle) - count_tokens(ended)),))

    def take(self, count: int, *, per_token: bool) -> int:
        """Reserve ``count`` consecutive handles, and return the first."""
        start = self._find(count)
        slots = slice(start, start + count)
        self.taken[slots], self.per_token[slots], self.last_at[slots] = True, per_token, 0.0
        self._next = start + count
        return start

    def give(self, handle: int) -> np.ndarray:
        """Free a handle, and return its tokens (uint32). A free handle has none."""
        tokens = self.tokens(handle)
        self._spans.pop(handle, None)
        self.taken[handle] = self.per_token[handle] = False
        block = int(self._block[handle])
        while block != _NONE:
            self._free.append(block)
            block = int(self._before[block])
        self._block[handle], self._filled[handle] = _NONE, BLOCK_TOKENS
        return tokens

    def tokens(self, handle: int) -> np.ndarray:
        """Return the tokens (uint32) of a handle."""
        block, filled, parts = int(self._block[handle]), int(self._filled[handle]), []
        while block != _NONE:
            parts.append(self._tokens[block, :filled])
            block, filled = int(self._before[block]), BLOCK_TOKENS
        if len(parts) == 1:
            return parts[0].copy()
        return np.concatenate(parts[::-1]) if parts else self._tokens[0, :0]

    def _count(self, handle: int) -> int:
        """Return the number of tokens of a handle."""
        block, filled, count = int(self._block[handle]), int(self._filled[handle]), 0
        while block != _NONE:
            count += filled
            block, filled = int(self._before[block]), BLOCK_TOKENS
        return count

    def store(self, handles: np.ndarray, tokens: np.ndarray) -> None:
        """Append ``tokens[i]`` to ``handles[i]``. Handles are distinct."""
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
        """Return the first of ``count`` consecutive free slots. Enlarge the arrays if there are none.

        The search starts behind the slots that were taken last.
        """
        size = len(self.taken)
        end = size - count + 1
        for start in chain(range(self._next, end, count), range(0, min(self._next, end), count)):
            if not self.taken[start : start + count].any():
                return start
        first, size = size, max(2 * size, size + count)
        self.taken, self.per_token = _grown(self.taken, size, False), _grown(self.per_token, size, False)
        self.last_at = _grown(self.last_at, size, 0.0)
        self._block, self._filled = _grown(self._block, size, _NONE), _grown(self._filled, size, BLOCK_TOKENS)
        return first


def _grown(array: np.ndarray, size: int, value: float) -> np.ndarray:
    larger = np.full((size, *array.shape[1:]), value, array.dtype)
    larger[: len(array)] = array
    return larger
