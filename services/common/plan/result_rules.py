"""The one judge of results: the scheduler raises its verdict, and the recorder reports it as a violation.

Which log-probabilities each row asked for is not judged here: the recorder follows that
(``services.scheduler.record.logprobs``).
"""

import numpy as np

from services.common.plan.result import ScoredTokens, StepResult
from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.types import WorkerLimits


class BrokenResult(Exception):
    """The result does not fit its plan. ``slot`` is where; None = in no single slot."""

    def __init__(self, message: str, *, step: int, slot: int | None = None) -> None:
        super().__init__(f"step {step}: {message}" if slot is None else f"step {step}, slot {slot}: {message}")
        self.message = message
        self.slot = slot


def check_result(result: StepResult, sampling: np.ndarray, limits: WorkerLimits) -> None:
    """Raise ``BrokenResult`` if arrays do not fit each other or the vocabulary, or if rows are missing.

    ``sampling`` int64 are the slots that the plan samples from.
    """
    rows, step = len(result.slots), result.step
    if len(result.tokens) != rows:
        raise BrokenResult(f"{len(result.tokens)} tokens for {rows} slots", step=step)
    if not _fits(result, sampling):
        failed = {failure.slot for failure in result.failures}
        wrong = sorted(set(sampling.tolist()) ^ {*result.slots.tolist(), *failed})
        raise BrokenResult(
            f"{rows} tokens and {len(result.failures)} failures, not for the {len(sampling)} slots that were to sample",
            step=step,
            slot=wrong[0] if wrong else None,
        )
    if result.tokens.max(initial=0) >= limits.vocab_size:
        raise BrokenResult("a token outside the vocabulary", step=step)
    if len(result.logprobs) not in (0, rows):
        raise BrokenResult(f"{len(result.logprobs)} logprobs for {rows} slots", step=step)
    if (top := result.top) is not None:
        if len(top) != rows or not top.whole:
            raise BrokenResult(
                f"{len(top)} top_counts for {rows} slots, {len(top.token_ids)} top_token_ids and {len(top.logprobs)}"
                f" top_logprobs of {top.counts.sum()} due",
                step=step,
            )
        if top.token_ids.max(initial=0) >= limits.vocab_size:
            raise BrokenResult("a top token outside the vocabulary", step=step)
    for scored in result.scored:
        _check_scored(scored, step, limits)
    if result.routed is not None:
        _check_routed(result.routed, step, limits)


def _check_routed(routed: RoutedExperts, step: int, limits: WorkerLimits) -> None:
    layout = limits.routed_experts
    if layout is None:
        raise BrokenResult(
            "experts of tokens, which this worker's WorkerInfo.routed_experts does not announce", step=step
        )
    if not routed.is_consistent or routed.experts.shape[1] != layout.token_bytes:
        lengths = len(routed.owners), len(routed.starts), len(routed.counts)
        raise BrokenResult(
            f"{routed.experts.size} bytes of experts for {routed.counts.sum()} tokens of {layout.token_bytes} bytes,"
            f" with arrays of the lengths {lengths}",
            step=step,
        )
    if routed.owners.max() >= limits.max_slots or len(np.unique(routed.owners)) < len(routed.owners):
        raise BrokenResult("experts of a slot that does not exist, or that occurs twice", step=step)


def _check_scored(scored: ScoredTokens, step: int, limits: WorkerLimits) -> None:
    count, top = len(scored.logprobs), scored.top
    if scored.slot >= limits.max_slots or scored.start < 1:
        raise BrokenResult(f"scores of the token at {scored.start}", step=step, slot=scored.slot)
    if not 0 < count == len(scored.ranks) == len(top) or not top.whole:
        lengths = len(scored.ranks), len(top.token_ids), len(top.logprobs)
        raise BrokenResult(f"scores of {count} tokens with arrays of {lengths}", step=step, slot=scored.slot)
    if top.token_ids.max(initial=0) >= limits.vocab_size:
        raise BrokenResult("a top token outside the vocabulary", step=step, slot=scored.slot)


def _fits(result: StepResult, sampling: np.ndarray) -> bool:
    """Return whether ``result`` has one token or failure for each of the slots ``sampling``, and no others."""
    if not result.failures and np.array_equal(result.slots, sampling):  # the usual order
        return True
    failed = np.array([failure.slot for failure in result.failures], np.int64)
    return np.array_equal(np.sort(np.concatenate((result.slots, failed))), np.sort(sampling))
