"""Log-probabilities of chosen and of most likely tokens, for the rows that asked."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.top_logprobs import TopLogprobs


class RowLogprobs(NamedTuple):
    """The last two fields of ``Sampled``. None = no row asked."""

    logprobs: np.ndarray | None  # [rows] float32, NaN where not asked
    top: TopLogprobs | None  # [rows]

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        asked: np.ndarray,
        top: np.ndarray,
        processed: tuple[np.ndarray, torch.Tensor] | None = None,
    ) -> "RowLogprobs":
        """Return log-probabilities of ``tokens [rows]`` and of the ``top [rows]`` best ones, for rows that ``asked``.

        ``logits [rows, vocab]`` are those after the penalties. ``processed`` are rows, all of which asked, and their
        logits ``[n, vocab]`` instead: tokens of minus infinity are not among the most likely ones.
        """
        if not asked.any():
            return cls(None, None)
        rows = np.flatnonzero(asked)
        index = torch.from_numpy(rows).to(logits.device)
        own = logits[index]
        if processed is not None:
            own[torch.from_numpy(np.searchsorted(rows, processed[0])).to(own.device)] = processed[1]
        chosen = torch.log_softmax(own, dim=-1)
        values = np.full(len(asked), np.nan, np.float32)
        values[rows] = chosen.gather(1, tokens[index].unsqueeze(1)).squeeze(1).cpu().numpy()
        counts = np.where(asked, top, 0)
        widest = int(counts.max())
        if widest == 0:
            return cls(values, None)
        best = chosen.topk(widest, dim=-1)
        best_values = best.values.cpu().numpy()
        wanted = (np.arange(widest) < counts[rows][:, None]) & (best_values != -np.inf)
        counts[rows] = wanted.sum(axis=1)
        return cls(values, TopLogprobs(counts, best.indices.cpu().numpy()[wanted], best_values[wanted]))


def join(parts: Sequence[RowLogprobs], sizes: Sequence[int]) -> RowLogprobs:
    """Return the rows of ``parts``, which have ``sizes`` rows, one after the other."""
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = np.concatenate(
            [
                np.full(size, np.nan, np.float32) if part.logprobs is None else part.logprobs
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
    return RowLogprobs(logprobs, TopLogprobs.join([part.top for part in parts], sizes))
