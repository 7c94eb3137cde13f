"""The draw itself, in two steps: a block of the vocabulary, then a token of it.

The largest of scaled logits plus Gumbel noise within a block is distributed as the block's log-sum-exp plus Gumbel
noise. So drawing the block by its log-sum-exp and then a token within it, with noise of its own, draws exactly from the
softmax, and noise is needed for one block's tokens instead of the whole vocabulary's.
"""

import torch

from services.worker.step.noise import NOISE_BLOCK, block_gumbel, gumbel


def draw(logits: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Tokens ``[rows]`` int64.

    ``logits [rows, vocab]`` float32; ``scales [rows]`` float32, one over the temperature; ``lowest [rows, 1]``: scaled
    logits below it cannot be drawn (None = all can); ``keys [rows, 2]`` int32 of the noise.
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
    """The log-sum-exp of every block, ``[rows, blocks]``; minus infinity where nothing of a block can be drawn."""
    whole = scaled.shape[1] // NOISE_BLOCK * NOISE_BLOCK
    weights: torch.Tensor = scaled[:, :whole].unflatten(1, (-1, NOISE_BLOCK)).logsumexp(dim=-1)
    if whole == scaled.shape[1]:
        return weights
    return torch.cat((weights, scaled[:, whole:].logsumexp(dim=-1, keepdim=True)), dim=1)
