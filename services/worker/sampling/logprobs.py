"""Log-probabilities of sampled and of most likely tokens, for the rows whose requests ask for them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class RowLogprobs(NamedTuple):
    """The last four fields of ``Sampled``. A field is None if no row asks for it."""

    logprobs: np.ndarray | None  # [rows] float32, NaN in rows that do not ask
    top_counts: np.ndarray | None  # [rows] int64
    top_token_ids: np.ndarray | None  # [sum(top_counts)] int64
    top_logprobs: np.ndarray | None  # [sum(top_counts)] float32

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        asked: np.ndarray,
        top: np.ndarray,
        processed: tuple[np.ndarray, torch.Tensor] | None = None,
    ) -> "RowLogprobs":
        """Return log-probabilities of ``tokens [rows]`` and of the ``top [rows]`` most likely tokens.

        ``asked [rows]`` bool selects the rows. ``logits [rows, vocab]`` are those after the penalties. ``processed``
        overrides the logits of some of these rows: it holds their indices ``[n]`` and logits ``[n, vocab]``. Tokens
        with a logit of -inf are not reported as most likely.
        """
        if not asked.any():
            return cls(None, None, None, None)
        rows = np.flatnonzero(asked)
        index = torch.from_numpy(rows).to(logits.device)
        selected = logits[index]
        if processed is not None:
            selected[torch.from_numpy(np.searchsorted(rows, processed[0])).to(selected.device)] = processed[1]
        logprobs = torch.log_softmax(selected, dim=-1)
        values = np.full(len(asked), np.nan, np.float32)
        values[rows] = logprobs.gather(1, tokens[index].unsqueeze(1)).squeeze(1).cpu().numpy()
        counts = np.where(asked, top, 0)
        widest = int(counts.max())
        if widest == 0:
            return cls(values, None, None, None)
        best = logprobs.topk(widest, dim=-1)
        best_values = best.values.cpu().numpy()
        wanted = (np.arange(widest) < counts[rows][:, None]) & (best_values != -np.inf)
        counts[rows] = wanted.sum(axis=1)
        return cls(values, counts, best.indices.cpu().numpy()[wanted], best_values[wanted])


def join(parts: Sequence[RowLogprobs], sizes: Sequence[int]) -> RowLogprobs:
    """Concatenate the log-probabilities of consecutive parts of a batch. ``sizes`` are the rows of each part."""
    logprobs = top_counts = top_token_ids = top_logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = np.concatenate(
            [
                np.full(size, np.nan, np.float32) if part.logprobs is None else part.logprobs
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
    if any(part.top_counts is not None for part in parts):
        top_counts = np.concatenate(
            [
                np.zeros(size, np.int64) if part.top_counts is None else part.top_counts
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
        top_token_ids = np.concatenate([part.top_token_ids for part in parts if part.top_token_ids is not None])
        top_logprobs = np.concatenate([part.top_logprobs for part in parts if part.top_logprobs is not None])
    return RowLogprobs(logprobs, top_counts, top_token_ids, top_logprobs)
