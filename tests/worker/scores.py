"""What to expect of log-probabilities of prompts."""

from collections.abc import Sequence

import numpy as np
import torch

from services.common.plan.result import ScoredTokens
from services.worker.step.output import StepOutput


def same_scores(expected: Sequence[StepOutput], found: Sequence[StepOutput], atol: float = 1e-4) -> None:
    """Fails unless every step has the same tokens scored, in the same order, with values equal up to ``atol``."""
    for each, other in zip(expected, found, strict=True):
        step = f"step {each.step}"
        assert [_what(part) for part in other.scored] == [_what(part) for part in each.scored], step
        for wanted, given in zip(each.scored, other.scored, strict=True):
            np.testing.assert_allclose(given.logprobs, wanted.logprobs, atol=atol, err_msg=step)
            # Tokens nobody would choose lie so close that rounding changes their places.
            np.testing.assert_allclose(given.ranks, wanted.ranks, atol=2, err_msg=step)
            np.testing.assert_allclose(given.top.logprobs, wanted.top.logprobs, atol=atol, err_msg=step)
            assert given.top.token_ids.tolist() == wanted.top.token_ids.tolist(), step


def _what(part: ScoredTokens) -> tuple:
    return part.slot, part.start, len(part.logprobs), len(part.ranks), part.top.counts.tolist()


def check_scores(
    parts: Sequence[ScoredTokens], prompt: Sequence[int], table: torch.Tensor, top: int, atol: float, first: int = 0
) -> None:
    """Fails unless ``parts``, in order, score all of ``prompt`` but its first token as ``table [tokens, vocabulary]``
    does, log-probabilities behind each. What differs by up to ``atol`` there may change places. ``first``: the place of
    that first token in its sequence."""
    places = [place for part in parts for place in range(part.start, part.start + len(part.logprobs))]
    assert places == list(range(first + 1, first + len(prompt)))
    table, chosen = table[:-1], table[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    logprobs, ranks, top_token_ids, top_logprobs = (
        torch.from_numpy(np.concatenate(arrays))
        for arrays in zip(
            *((part.logprobs, part.ranks, part.top.token_ids, part.top.logprobs) for part in parts), strict=True
        )
    )
    assert all(count == top for part in parts for count in part.top.counts.tolist())
    shape = len(prompt) - 1, top
    top_token_ids, top_logprobs = top_token_ids.long().view(shape), top_logprobs.view(shape)
    torch.testing.assert_close(logprobs, chosen, atol=atol, rtol=0)
    fewest, most = ((table > (chosen + margin).unsqueeze(1)).sum(1) + 1 for margin in (2 * atol, -2 * atol))
    assert ((fewest <= ranks) & (ranks <= most)).all()
    torch.testing.assert_close(top_logprobs, table.topk(top).values, atol=atol, rtol=0)
    torch.testing.assert_close(top_logprobs, table.gather(1, top_token_ids), atol=atol, rtol=0)
    assert all(len(set(row)) == top for row in top_token_ids.tolist())
