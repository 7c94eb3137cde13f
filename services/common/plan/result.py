"""A step result: what a worker returns for one plan. Numpy only; ``codec`` has the wire format."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.top_logprobs import TopLogprobs


class ScoredTokens(NamedTuple):
    """Log-probabilities of consecutive prompt tokens of one sequence."""

    slot: int
    start: int  # position in the sequence of the first of them
    logprobs: np.ndarray  # [tokens] float32
    ranks: np.ndarray  # [tokens] unsigned 32-bit values of any integer dtype, 1 = the most likely token
    top: TopLogprobs  # [tokens], as many in each row as were asked for

    def behind(self, tokens: int) -> "ScoredTokens":
        """Return all but the first ``tokens`` tokens."""
        rest = self.logprobs[tokens:], self.ranks[tokens:], self.top[tokens:]
        return ScoredTokens(self.slot, self.start + tokens, *rest)


class SlotFailure(NamedTuple):
    """A sequence that the worker could not compute."""

    slot: int
    message: str
    forbidden: bool = False  # its grammar does not allow the tokens generated before its admission


@dataclass
class Timing:
    """Nanoseconds."""

    prepare: int = 0
    forward: int = 0
    sample: int = 0
    device: int = 0  # the device worked on the step; 0 = not measured, as `idle`
    idle: int = 0  # the device had nothing to do since the step before
    queued: int = 0  # from the plan's arrival to its start

    @property
    def late(self) -> int:
        """The part of ``idle`` that an earlier plan would have avoided, because no plan was queued."""
        return max(0, self.idle - self.queued)


def _no_logprobs() -> np.ndarray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one plan. Arrays are parallel to ``slots``."""

    step: int
    slots: np.ndarray  # [n] int64, rows that sampled a token, in batch order
    tokens: np.ndarray  # [n] int64
    logprobs: np.ndarray = field(default_factory=_no_logprobs)  # [n] float32, NaN where not asked; [0] = no row asked
    top: TopLogprobs | None = None  # [n]; None = no row asked
    failures: tuple[SlotFailure, ...] = ()
    scored: tuple[ScoredTokens, ...] = ()  # in batch order; the tokens of a sequence may come in parts
    timing: Timing = field(default_factory=Timing)
    queued_plans: int = 0  # received and not yet started when this step ended
    routed: RoutedExperts | None = None  # owners are slots, each once; None = no row asked
