"""The output of a runner for one step. No wire types, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.plan.result import ScoredTokens, SlotFailure, StepResult, Timing
from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.top_logprobs import TopLogprobs


@dataclass(frozen=True)
class Sampled:
    """Samples of the rows that computed all their known tokens. Arrays are parallel to ``slots``."""

    slots: np.ndarray  # [n] int64, in batch order
    token_ids: np.ndarray  # [n] int64
    finite: np.ndarray  # [n] bool; False = the logits were not numbers, and the token is undefined
    logprobs: np.ndarray | None = None  # [n] float32, NaN for rows that did not request them; None if no row did
    top: TopLogprobs | None = None  # [n]; None if no row requested them

    @classmethod
    def join(cls, parts: "Sequence[Sampled]") -> "Sampled":
        """Concatenate the samples of consecutive parts of a batch."""
        if len(parts) < 2:
            return parts[0] if parts else NOTHING_SAMPLED
        sizes, logprobs = [len(part.slots) for part in parts], None
        if any(part.logprobs is not None for part in parts):
            columns = zip((part.logprobs for part in parts), sizes, strict=True)
            logprobs = np.concatenate([np.full(n, np.nan, np.float32) if each is None else each for each, n in columns])
        return cls(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.finite for part in parts]),
            logprobs,
            TopLogprobs.join([part.top for part in parts], sizes),
        )

    def __getitem__(self, rows: np.ndarray) -> "Sampled":
        """Return the given rows, in that order. ``rows`` are indices, int64, or a mask, ``[n]`` bool."""
        columns = self.slots, self.token_ids, self.finite, self.logprobs, self.top
        return Sampled(*(None if column is None else column[rows] for column in columns))  # type: ignore[arg-type]  # only the last two are None


NOTHING_SAMPLED = Sampled(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))


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
    routed: RoutedExperts | None = None

    def to_result(self, queued_plans: int = 0) -> StepResult:
        """Return the result for the scheduler. Rows whose logits are not numbers become failures."""
        sampled, good = self.sampled, self.sampled.finite
        failures: list[SlotFailure] = []
        if not good.all():
            failed = sampled.slots[~good].tolist()
            failures = [SlotFailure(slot, *self.failures.get(slot, _NO_NUMBERS)) for slot in failed]
            sampled = sampled[good]
        return StepResult(
            self.step,
            sampled.slots,
            sampled.token_ids,
            np.zeros(0, np.float32) if sampled.logprobs is None else sampled.logprobs,
            sampled.top,
            tuple(failures),
            self.scored,
            self.timing,
            queued_plans,
            self.routed,
        )
