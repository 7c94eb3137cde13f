"""Log-probabilities of a prompt's own tokens, a few rows of logits at a time: a long prompt takes no more memory."""

from collections.abc import Callable

import numpy as np
import torch

from services.worker.runner.inputs import ToScore
from services.worker.runner.plan import Scored
from services.worker.runner.slots import SlotTable

# Logits at once, in elements: 16 MiB in float32.
_SLICE_ELEMENTS = 4 * 1024 * 1024


def score(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    wanted: ToScore,
    table: SlotTable,
    vocab_size: int,
) -> Scored:
    """``hidden [tokens, hidden_size]`` of the shard that ``wanted`` speaks of. A sequence whose logits are not numbers
    fails when it samples."""
    rows, top = max(1, _SLICE_ELEMENTS // vocab_size), int(table.prompt_logprobs[wanted.slot])
    parts = []
    for start in range(0, len(wanted.token_ids), rows):
        token_ids = torch.from_numpy(wanted.token_ids[start : start + rows]).to(hidden.device)
        first = wanted.first + start
        parts.append(_score_slice(to_logits(hidden[first : first + len(token_ids)]), token_ids, top))
    logprobs, ranks, top_token_ids, top_logprobs = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
    if not np.isfinite(logprobs).all():
        table.failed[wanted.slot] = True
    return Scored(wanted.slot, wanted.start, logprobs, ranks, top_token_ids, top_logprobs)


def _score_slice(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and ranks of ``token_ids [rows]``, and the ``top`` most likely tokens of each row."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1) + 1
    best = logits.topk(top, dim=-1)
    return (chosen - total).squeeze(1), ranks, best.indices, best.values - total
