"""Whether a worker's answer is one to its plan."""

import numpy as np

from services.scheduler.core.plan import Result, Scored, WrongAnswer
from services.scheduler.core.request import WorkerShape


def check_answer(result: Result, sampling: np.ndarray, shape: WorkerShape) -> None:
    """Raises ``WrongAnswer``: arrays that do not fit each other or the vocabulary would be taken for something else.

    ``sampling``: slots that were to sample, int64.
    """
    rows = len(result.slots)
    whole = len(result.tokens) == rows and len(result.logprobs) in (0, rows)
    whole = whole and (result.top is None or (len(result.top) == rows and result.top.whole))
    whole = whole and all(_is_whole(slot, scored, shape) for slot, scored in result.scored)
    if not whole or result.tokens.max(initial=0) >= shape.vocab_size:
        raise WrongAnswer(f"step {result.step}: tokens that do not exist, or arrays of unequal length")
    if not _answers(result, sampling):
        raise WrongAnswer(
            f"step {result.step}: {len(result.slots)} tokens and {len(result.failures)} failures, not for the"
            f" {len(sampling)} slots that were to sample"
        )


def _is_whole(slot: int, scored: Scored, shape: WorkerShape) -> bool:
    count, listed = len(scored.logprobs), len(scored.top_token_ids)
    fits = slot < shape.max_slots and scored.start > 0 < count == len(scored.ranks)
    fits = fits and listed % count == 0 and listed == len(scored.top_logprobs)
    return bool(fits and scored.top_token_ids.max(initial=0) < shape.vocab_size)


def _answers(result: Result, sampled: np.ndarray) -> bool:
    """Whether ``result`` has a token or a failure for each of the slots ``sampled`` and nothing else."""
    if not result.failures and np.array_equal(result.slots, sampled):  # the usual order
        return True
    failed = np.array([failure.slot for failure in result.failures], np.int64)
    return np.array_equal(np.sort(np.concatenate((result.slots, failed))), np.sort(sampled))
