"""Log-probabilities of prompt tokens, in slices of rows that bound the memory for logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.result import ScoredTokens
from services.common.plan.top_logprobs import TopLogprobs
from services.worker.step.slots import SlotTable

# Logits of one slice, in elements: 16 MiB in float32.
SLICE_ELEMENTS = 4 * 1024 * 1024


@dataclass(frozen=True)
class ScoreSpan:
    """Consecutive prompt tokens of one row whose log-probabilities a request asks for."""

    slot: int
    start: int  # position in the sequence of the first of ``token_ids``
    first: int  # index within the shard of the token before the first of ``token_ids``
    token_ids: np.ndarray  # [n] int64


class RowScores(NamedTuple):
    """Scores of prompt tokens in device memory, written by launches that may still be queued."""

    logprobs: torch.Tensor  # [rows] float32
    ranks: torch.Tensor  # [rows] int32, 1 = the most likely token
    top_token_ids: torch.Tensor  # [rows, top] int32, most likely first
    top_logprobs: torch.Tensor  # [rows, top] float32


def score(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    span: ScoreSpan,
    table: SlotTable,
    vocab_size: int,
) -> ScoredTokens:
    """Return the scores of ``span``, whose shard has the final hidden states ``hidden [tokens, hidden_size]``.

    If a log-probability is not finite, the slot is marked as failed, and the sequence fails when it samples.
    """
    rows, top = max(1, SLICE_ELEMENTS // vocab_size), int(table.prompt_logprobs[span.slot])
    token_ids = torch.from_numpy(span.token_ids).to(hidden.device)
    hidden = hidden[span.first : span.first + len(token_ids)]
    scores = score_rows(hidden, to_logits, token_ids, top, vocab_size, rows)
    logprobs, ranks, top_token_ids, top_logprobs = (each.cpu().numpy() for each in scores)
    if not np.isfinite(logprobs).all():
        table.failed[span.slot] = True
    return ScoredTokens(span.slot, span.start, logprobs, ranks, TopLogprobs.of(top_token_ids, top_logprobs))


def score_rows(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    token_ids: torch.Tensor,
    top: int,
    vocab_size: int,
    rows: int,
) -> RowScores:
    """Return scores of ``token_ids [n]`` int64, n > 0, and of the ``top`` most likely tokens at the same positions.

    ``hidden [n, hidden_size]`` are the hidden states of the tokens before them. ``to_logits`` maps ``rows`` rows of it
    at a time to logits ``[rows, vocab_size or more]``. If it is a collective, all ranks must make the same call.
    """
    parts = []
    for start in range(0, len(token_ids), rows):
        part = slice(start, start + rows)
        parts.append(_score_slice(to_logits(hidden[part])[:, :vocab_size].float(), token_ids[part], top))
    return parts[0] if len(parts) == 1 else RowScores(*map(torch.cat, zip(*parts, strict=True)))


def _score_slice(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> RowScores:
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    best = logits.topk(top, dim=-1)
    return RowScores((chosen - total).squeeze(1), ranks, best.indices.int(), best.values - total)
