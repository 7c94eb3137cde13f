"""What a runner returns for one step. No wire types, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.plan.top_logprobs import TopLogprobs


@dataclass(frozen=True)
class Sampled:
    """What the rows that reached the end of their known tokens gave. Arrays are parallel to ``slots``."""

    slots: np.ndarray  # [n] int64, in batch order
    token_ids: np.ndarray  # [n] int64
    finite: np.ndarray  # [n] bool; where False the logits were not numbers and the token means nothing
    logprobs: np.ndarray | None = None  # [n] float32, NaN where not asked; None when no row asked
    top: TopLogprobs | None = None  # [n]; None when no row asked


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of consecutive prompt tokens of one sequence."""

    slot: int
    start: int  # place in the sequence of the first of them
    logprobs: np.ndarray  # [n] float32
    ranks: np.ndarray  # [n] int64, 1 = the most likely token
    top_token_ids: np.ndarray  # [n, asked for] int64, most likely first
    top_logprobs: np.ndarray  # beside top_token_ids


@dataclass
class Timing:
    """Nanoseconds."""

    prepare: int = 0
    forward: int = 0
    sample: int = 0
    device: int = 0  # the device worked on the step; 0 = not measured, as `idle`
    idle: int = 0  # it had nothing to do since the step before


class Failure(NamedTuple):
    """Why a sequence fails whose logits are numbers."""

    message: str
    forbidden: bool = False  # its grammar does not allow what was generated before its admission


@dataclass(frozen=True)
class StepOutput:
    """One answer for one plan."""

    step: int
    sampled: Sampled
    timing: Timing = field(default_factory=Timing)
    scored: tuple[Scored, ...] = ()  # in batch order; a sequence may come in parts
    failures: Mapping[int, Failure] = field(default_factory=dict)  # by slot
