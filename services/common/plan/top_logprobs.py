"""The most likely tokens of each row, as ragged arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.uint32), np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """``counts[i]`` tokens for row ``i``, most likely first. ``top[rows]`` has the given rows only, in that order."""

    counts: np.ndarray  # [rows] int64
    token_ids: np.ndarray  # [sum(counts)] unsigned 32-bit values of any integer dtype, row after row
    logprobs: np.ndarray  # [sum(counts)] float32, beside token_ids

    @classmethod
    def of(cls, token_ids: np.ndarray, logprobs: np.ndarray) -> "TopLogprobs":
        """Return rows of equally many tokens, from arrays ``[rows, tokens]``."""
        rows, width = token_ids.shape
        return cls(np.full(rows, width, np.int64), token_ids.reshape(-1), logprobs.reshape(-1))

    @classmethod
    def none(cls, rows: int) -> "TopLogprobs":
        """Return ``rows`` rows without tokens."""
        return cls(np.zeros(rows, np.int64), _NO_TOKENS, _NO_LOGPROBS)

    @classmethod
    def join(cls, parts: Sequence["TopLogprobs | None"], sizes: Sequence[int]) -> "TopLogprobs | None":
        """Return the rows of ``parts`` one after the other, or None if all are None.

        ``sizes`` are the numbers of rows: a part that is None has no tokens for them.
        """
        if all(part is None for part in parts):
            return None
        filled = [cls.none(size) if part is None else part for part, size in zip(parts, sizes, strict=True)]
        return cls(
            np.concatenate([part.counts for part in filled]),
            np.concatenate([part.token_ids for part in filled if len(part.token_ids)] or [_NO_TOKENS]),
            np.concatenate([part.logprobs for part in filled]),
        )

    @property
    def whole(self) -> bool:
        """True if the arrays fit each other."""
        return int(self.counts.sum()) == len(self.token_ids) == len(self.logprobs)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: slice | npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "TopLogprobs":
        counts = self.counts[rows]
        starts = (np.cumsum(self.counts) - self.counts)[rows]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(starts, counts) + within
        return TopLogprobs(counts, self.token_ids[at], self.logprobs[at])
