"""The output of a runner for one step. No wire types, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.plan.result import ScoredTokens, SlotFailure, StepResult, Timing
from services.common.plan.top_logprobs import TopLogprobs


@dataclass(frozen=True)
class Sampled:
    """Samples of the rows that computed all their known tokens. Arrays are parallel to ``slots``."""

    slots: np.ndarray  # [n] int64, in batch order
    token_ids: np.ndarray  # [n] int64
    finite: np.ndarray  # [n] bool; False = the logits were not numbers, and the token is undefined
    logprobs: np.ndarray | None = None  # [n] float32, NaN for rows that did not request them; None if no row did
    top: TopLogprobs | None = None  # [n]; None if no row requested them


class Failure(NamedTuple):
    """The reason why a sequence fails."""

    message: str
    forbidden: bool = False  # the grammar does not allow the tokens that were generated before the admission


_NO_NUMBERS = Failure("the model's logits are not numbers")


@dataclass(frozen=True)
class StepOutput:
    """The output of a runner for one plan."""

    step: int
    sampled: Sampled
    timing: Timing = field(default_factory=Timing)
    scored: tuple[ScoredTokens, ...] = ()  # in batch order; a sequence may have several
    failures: Mapping[int, Failure] = field(default_factory=dict)  # by slot

    def to_result(self, queued_plans: int = 0) -> StepResult:
        """Return the result for the scheduler. Rows whose logits are not numbers become failures."""
        sampled, good = self.sampled, self.sampled.finite
        failures: list[SlotFailure] = []
        if good.all():
            slots, tokens, logprobs, top = sampled.slots, sampled.token_ids, sampled.logprobs, sampled.top
        else:
            failed = sampled.slots[~good].tolist()
            failures = [SlotFailure(slot, *self.failures.get(slot, _NO_NUMBERS)) for slot in failed]
            slots, tokens = sampled.slots[good], sampled.token_ids[good]
            logprobs = None if sampled.logprobs is None else sampled.logprobs[good]
            top = None if sampled.top is None else sampled.top[good]
        return StepResult(
            self.step,
            slots,
            tokens,
            np.zeros(0, np.float32) if logprobs is None else logprobs,
            top,
            tuple(failures),
            self.scored,
            self.timing,
            queued_plans,
        )
