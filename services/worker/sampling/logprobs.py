"""Log-probabilities of sampled and of most likely tokens, for the rows whose requests ask for them."""

import numpy as np
import torch

from services.common.plan.top_logprobs import TopLogprobs


def row_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    asked: np.ndarray,
    top: np.ndarray,
    processed: tuple[np.ndarray, torch.Tensor] | None = None,
) -> tuple[np.ndarray | None, TopLogprobs | None]:
    """Return ``logprobs`` and ``top`` of ``Sampled`` for ``tokens [rows]`` and the ``top [rows]`` most likely tokens.

    ``asked [rows]`` bool selects the rows. ``logits [rows, vocab]`` are those after the penalties. ``processed``
    overrides the logits of some of these rows: it holds their indices ``[n]`` and logits ``[n, vocab]``. Tokens with a
    logit of -inf are not reported as most likely.
    """
    if not asked.any():
        return None, None
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
        return values, None
    best = logprobs.topk(widest, dim=-1)
    best_values = best.values.cpu().numpy()
    wanted = (np.arange(widest) < counts[rows][:, None]) & (best_values != -np.inf)
    counts[rows] = wanted.sum(axis=1)
    return values, TopLogprobs(counts, best.indices.cpu().numpy()[wanted], best_values[wanted])
