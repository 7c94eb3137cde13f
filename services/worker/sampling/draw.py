"""Draw of a token in two steps: first a block of the vocabulary, then a token of this block.

Within a block, the maximum of scaled logits plus Gumbel noise has the same distribution as the block's log-sum-exp plus
Gumbel noise. A block is therefore drawn by its log-sum-exp, and a token of it with independent noise. The result is
distributed exactly as the softmax, and noise is computed for the tokens of one block only.
"""

import torch

from services.worker.step.noise import NOISE_BLOCK, block_gumbel, gumbel


def draw(logits: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Return one drawn token per row, ``[rows]`` int64.

    ``logits [rows, vocab]`` and ``scales [rows]``, one over the temperature, are float32. ``lowest [rows, 1]`` float32
    is the lowest scaled logit that can be drawn; None allows all. ``keys [rows, 2]`` int32 selects the noise.
    """
    vocab = logits.shape[1]
    scaled = logits * scales.unsqueeze(1)
    if lowest is not None:
        scaled.masked_fill_(scaled < lowest, -torch.inf)
    if vocab <= NOISE_BLOCK:
        token_ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
        return gumbel(keys.unsqueeze(1), token_ids).add_(scaled).argmax(dim=-1)
    weights = _block_weights(scaled)
    blocks = block_gumbel(keys, weights.shape[1]).add_(weights).argmax(dim=-1, keepdim=True)
    token_ids = blocks * NOISE_BLOCK + torch.arange(NOISE_BLOCK, device=logits.device)
    within = scaled.gather(1, token_ids.clamp(max=vocab - 1)).masked_fill_(token_ids >= vocab, -torch.inf)
    chosen = gumbel(keys.unsqueeze(1), token_ids.int()).add_(within).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, chosen).squeeze(1)


def _block_weights(scaled: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of each block, ``[rows, blocks]``. It is -inf if no token of the block can be drawn."""
    whole = scaled.shape[1] // NOISE_BLOCK * NOISE_BLOCK
    weights: torch.Tensor = scaled[:, :whole].unflatten(1, (-1, NOISE_BLOCK)).logsumexp(dim=-1)
    if whole == scaled.shape[1]:
        return weights
    return torch.cat((weights, scaled[:, whole:].logsumexp(dim=-1, keepdim=True)), dim=1)
