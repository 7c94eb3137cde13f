"""The draw itself: the largest of scaled logits plus noise."""

import torch

from services.worker.sampling.noise import gumbel


def draw(logits: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Tokens ``[rows]`` int64.

    ``logits [rows, vocab]`` float32; ``scales [rows]`` float32, one over the temperature; ``lowest [rows, 1]``: scaled
    logits below it cannot be drawn (None = all can); ``keys [rows, 2]`` int32 of the noise.
    """
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scaled = logits * scales.unsqueeze(1)
    noisy = gumbel(keys.unsqueeze(1), token_ids).add_(scaled)
    if lowest is not None:
        noisy.masked_fill_(scaled < lowest, -torch.inf)
    return noisy.argmax(dim=-1)
