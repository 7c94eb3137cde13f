"""Truncation by top-k, top-p and min-p as one threshold per row. Tokens with a lower logit cannot be drawn."""

import torch

# This number of largest logits almost always decides the threshold. Other rows need a full sort.
_CANDIDATES = 256


def thresholds(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """Return the lowest logit that each row can draw, ``[rows, 1]`` float32.

    ``logits [rows, vocab]`` float32 are after temperature. ``top_k [rows]`` int64 is off at 0, ``top_p [rows]`` float32
    at 1, and ``min_p [rows]`` float32 at 0; None is off for all rows. They apply in this order, each to the tokens that
    the one before kept. Equal logits are kept or dropped together.
    """
    lowest = torch.full((logits.shape[0], 1), -torch.inf, device=logits.device)
    if top_k is not None or top_p is not None:
        lowest = _top(logits, top_k, top_p)
    if min_p is not None:
        largest = logits.max(dim=-1, keepdim=True).values
        lowest = torch.maximum(lowest, largest + min_p.unsqueeze(1).log())
    return lowest


def _top(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    vocab = logits.shape[1]
    keep = torch.full((logits.shape[0],), vocab, device=logits.device)
    if top_k is not None:
        keep = torch.where(top_k > 0, top_k.clamp(max=vocab), keep)
    if vocab > 2 * _CANDIDATES and logits.device.type == "cpu":
        best = logits.topk(_CANDIDATES).values
        found, enough = _cut(logits, best, keep, top_p)
        if bool(enough.all()):
            return found
        rest = (~enough).nonzero().squeeze(1)
        remaining = logits[rest]
        ordered = remaining.sort(dim=-1, descending=True).values
        found[rest] = _cut(remaining, ordered, keep[rest], None if top_p is None else top_p[rest])[0]
        return found
    return _cut(logits, logits.sort(dim=-1, descending=True).values, keep, top_p)[0]


def _cut(
    logits: torch.Tensor, ordered: torch.Tensor, keep: torch.Tensor, top_p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the thresholds ``[rows, 1]``, and whether the largest logits ``ordered`` decide them, ``[rows]`` bool."""
    width = ordered.shape[1]
    whole = keep >= logits.shape[1]
    enough = (keep <= width) | whole
    kth = ordered.gather(1, (keep.clamp(max=width) - 1).unsqueeze(1))
    lowest = torch.where(whole.unsqueeze(1), -torch.inf, kth)
    if top_p is None:
        return lowest, enough
    # A token is kept if the mass before it is less than top_p, relative to the mass of the tokens that top-k kept.
    left = ordered.masked_fill(ordered < lowest, -torch.inf)
    if width < logits.shape[1]:
        total = torch.where(whole.unsqueeze(1), logits.logsumexp(1, keepdim=True), left.logsumexp(1, keepdim=True))
    else:
        total = left.logsumexp(1, keepdim=True)
    mass = (left - total).exp_().cumsum(dim=1)
    kept = (mass < top_p.unsqueeze(1)).sum(dim=1, keepdim=True) + 1  # the first token is always kept
    off = top_p >= 1
    enough &= off | (kept.squeeze(1) <= width) | ~whole
    nucleus = ordered.gather(1, kept.clamp(max=width) - 1)
    return torch.where(off.unsqueeze(1), lowest, torch.maximum(lowest, nucleus)), enough
