"""Check that a result fits its plan."""

import numpy as np

from services.common.plan.result import ScoredTokens, StepResult
from services.common.plan.types import WorkerLimits
from services.scheduler.core.plan import WrongAnswer


def check_result(result: StepResult, sampling: np.ndarray, shape: WorkerLimits) -> None:
    """Raise ``WrongAnswer`` if arrays do not fit each other or the vocabulary, or if rows are missing.

    ``sampling`` are the slots for which the plan samples a token, int64.
    """
    rows = len(result.slots)
    whole = len(result.tokens) == rows and len(result.logprobs) in (0, rows)
    whole = whole and (result.top is None or (len(result.top) == rows and result.top.whole))
    whole = whole and all(_is_whole(scored, shape) for scored in result.scored)
    if not whole or result.tokens.max(initial=0) >= shape.vocab_size:
        raise WrongAnswer(f"step {result.step}: tokens that do not exist, or arrays of unequal length")
    if not _has_each_slot(result, sampling):
        raise WrongAnswer(
            f"step {result.step}: {len(result.slots)} tokens and {len(result.failures)} failures, not for the"
            f" {len(sampling)} slots that were to sample"
        )


def _is_whole(scored: ScoredTokens, shape: WorkerLimits) -> bool:
    count, top = len(scored.logprobs), scored.top
    fits = scored.slot < shape.max_slots and scored.start > 0 < count == len(scored.ranks) == len(top) and top.whole
    return bool(fits and top.token_ids.max(initial=0) < shape.vocab_size)


def _has_each_slot(result: StepResult, sampled: np.ndarray) -> bool:
    """Return whether ``result`` has one token or failure for each of the slots ``sampled``, and no others."""
    if not result.failures and np.array_equal(result.slots, sampled):  # the usual order
        return True
    failed = np.array([failure.slot for failure in result.failures], np.int64)
    return np.array_equal(np.sort(np.concatenate((result.slots, failed))), np.sort(sampled))
