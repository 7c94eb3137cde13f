"""Log-probabilities of a prompt's own tokens, a few rows of logits at a time: a long prompt takes no more memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from services.worker.step.plan import Scored
from services.worker.step.slots import SlotTable

# Logits at once, in elements: 16 MiB in float32.
SLICE_ELEMENTS = 4 * 1024 * 1024


@dataclass(frozen=True)
class ToScore:
    """Prompt tokens of one row whose log-probabilities a request asks for."""

    slot: int
    start: int  # position in the sequence of the first of ``token_ids``
    first: int  # index within the shard of the token before it, from which it is scored; the others follow
    token_ids: np.ndarray  # [n] int64, those to be scored


class RowScores(NamedTuple):
    """On the device of the logits; written by launches that may not have run yet."""

    logprobs: torch.Tensor  # [rows] float32
    ranks: torch.Tensor  # [rows] int32, 1 = the most likely token
    top_token_ids: torch.Tensor  # [rows, top] int32, most likely first
    top_logprobs: torch.Tensor  # beside top_token_ids, float32


def score(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    wanted: ToScore,
    table: SlotTable,
    vocab_size: int,
) -> Scored:
    """``hidden [tokens, hidden_size]`` of the shard that ``wanted`` speaks of. A sequence whose logits are not numbers
    fails when it samples."""
    rows, top = max(1, SLICE_ELEMENTS // vocab_size), int(table.prompt_logprobs[wanted.slot])
    token_ids = torch.from_numpy(wanted.token_ids).to(hidden.device)
    hidden = hidden[wanted.first : wanted.first + len(token_ids)]
    found = score_rows(hidden, to_logits, token_ids, top, vocab_size, rows)
    logprobs, ranks, top_token_ids, top_logprobs = (each.cpu().numpy() for each in found)
    if not np.isfinite(logprobs).all():
        table.failed[wanted.slot] = True
    places = wanted.slot, wanted.start
    return Scored(*places, logprobs, ranks.astype(np.int64), top_token_ids.astype(np.int64), top_logprobs)


def score_rows(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    token_ids: torch.Tensor,
    top: int,
    vocab_size: int,
    rows: int,
) -> RowScores:
    """Of ``token_ids [n]`` int64, n > 0, each behind the token that ``hidden [n, hidden_size]`` has, and of the ``top``
    most likely ones there; from the logits of ``rows`` rows at a time.

    ``to_logits``: from hidden rows to logits ``[n, vocab_size or more]``. Where several ranks make them together, all
    call this alike.
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
